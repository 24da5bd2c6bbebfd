"""A checkpoint's configuration, checked when it is read.

This module does not import PyTorch, because the front end imports it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from kernels.weight_format import WeightFormat
from model.checkpoint.families import (
    ACTIVATIONS,
    FAMILIES,
    Family,
    find_activation,
    find_architecture,
    layer_windows,
)
from model.checkpoint.formats.table import detect
from model.checkpoint.generation_config import FILE as GENERATION_CONFIG
from model.checkpoint.generation_config import MAX_FILE_BYTES
from model.checkpoint.network_config import NetworkConfig
from model.checkpoint.rope_config import read_rotary, read_rotary_by_layer_type, rotary_to_dict
from model.errors import ModelError, ModelFolderError, UnsupportedModelError
from model.json_input import Harmless, convert, read_json_object, refuse, shorten
from model.network.spec import Rotary

DTYPES: Final = ("float32", "bfloat16", "float16")

# Keys for unsupported features, each group after the values with which its keys have no effect.
_HARMLESS: Final[Harmless] = (
    ((False,), ("is_encoder_decoder", "add_cross_attention", "use_mrope")),
    ((0,), ("n_routed_experts",)),
    ((0, 1), ("num_local_experts", "num_experts")),
    ((1,), ("partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")),
    ((), ("auto_map", "attn_logit_softcapping",
          "final_logit_softcapping", "logits_soft_cap", "attention_chunk_size", "attention_multiplier",
          "no_rope_layers", "clip_qkv", "dual_chunk_attention_config")),
)  # fmt: skip
_TokenId = Annotated[int, Meta(ge=0)]
_TokenIds = _TokenId | list[_TokenId] | None

_RENAMED: Final = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
}
_SAME_NAME: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "attention_bias",
    "mlp_bias", "tie_word_embeddings", "sliding_window", "initializer_range",
)  # fmt: skip
_KEYS: Final = _RENAMED | {name: name for name in _SAME_NAME}
"""Fields of `ModelConfig` whose values config.json holds unchanged, and their keys there in most families."""
_NULLABLE: Final = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Keys whose null switches the feature off, rather than standing for the default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkConfig):
    """The configuration of one checkpoint.

    Attributes:
        dtype: dtype of the checkpoint: "float32", "bfloat16" or "float16".
        weight_format: in which it stores the matrices of the layers; None for full numbers.
        eos_token_ids: all ids that end a generation, from config.json and generation_config.json.

    Raises:
        ModelFolderError: see `NetworkConfig`.
    """

    dtype: str = "float32"
    weight_format: WeightFormat | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` and, if it exists, `generation_config.json`.

        Args:
            path: a Hugging Face checkpoint folder.

        Raises:
            ModelFolderError: a file is missing or broken, or a value is missing, of the wrong type
                or outside its limits.
            UnsupportedModelError: the architecture or a feature is not supported.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelFolderError(
                f"{folder} is not a folder; a model is a folder with a config.json"
            )
        file, generation_file = folder / "config.json", folder / GENERATION_CONFIG
        if not file.is_file():
            raise ModelFolderError(f"{folder} has no config.json; a model folder needs one")
        config, generation_config = (
            read_json_object(it, MAX_FILE_BYTES) if it.is_file() else {}
            for it in (file, generation_file)
        )
        try:
            return cls.from_dict(config, generation_config)
        except ModelError as error:
            raise type(error)(f"{file}: {error}") from None

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None
    ) -> ModelConfig:
        """Build the configuration from the parsed content of `config.json`.

        Args:
            config: in the classic form (`rope_scaling`, `torch_dtype`) or in that of transformers 5
                (`rope_parameters`, `dtype`).
            generation_config: its end-of-sequence ids are added to those of `config`.

        Raises:
            ModelFolderError: a value is missing, of the wrong type or outside its limits.
            UnsupportedModelError: the architecture or a feature is not supported.
        """
        architecture = find_architecture(config)
        family = FAMILIES[architecture]
        keys = _keys_of(family)
        unread = {key: value for key, value in config.items() if key not in keys.values()}
        weight_format = detect(config)
        refuse(unread, _HARMLESS + family.harmless)
        stated = family.defaults | {key: it for key, it in config.items() if it is not None}
        for key in _NULLABLE:
            if config.get(key, 0) is None:
                stated.pop(key, None)
        values = {name: stated[key] for name, key in keys.items() if key in stated}
        values["attention_output_bias"] = values.get("attention_bias")
        if family.inner_ratio and isinstance(values.get("hidden_size"), int):
            values.setdefault("intermediate_size", family.inner_ratio * values["hidden_size"])
        values |= {"architecture": architecture} | family.fixed
        base = convert(values, cls, keys)
        refuse(config, (((base.hidden_size,), family.hidden_size_keys),))
        window, layer_types = layer_windows(config, family, base.sliding_window, base.num_layers)
        other = convert(config, _OtherKeys)
        prefix = "generation_config.json: "
        generation = convert(generation_config or {}, _EndKeys, prefix=prefix)
        bos = _token_ids(other.bos_token_id, base.vocab_size, "bos_token_id")
        eos = _token_ids(other.eos_token_id, base.vocab_size, "eos_token_id")
        eos += _token_ids(generation.eos_token_id, base.vocab_size, prefix + "eos_token_id")
        rope, local_rope = _ropes(config, family, base.max_position_embeddings)
        return dataclasses.replace(
            base,
            activation=find_activation(config, family),
            rope=rope,
            local_rope=local_rope,
            sliding_window=window,
            layer_types=layer_types,
            dtype=_dtype(other),
            weight_format=weight_format,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )

    def parallel_unsupported(self, size: int) -> tuple[str, ...]:
        """List why `size` ranks cannot share the model; empty if they can."""
        divided = {
            "key-value heads": self.num_kv_heads,
            "columns of the MLP": self.intermediate_size,
        }
        reasons = [
            f"{size} is no divisor of its {count} {what}"
            for what, count in divided.items()
            if count % size
        ]
        if size > 1 and FAMILIES[self.architecture].stacks_qkv:
            reasons.append(f"{self.architecture} stores q, k and v as one tensor")
        return tuple(reasons)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `config.json`, in the classic form, which all versions of transformers read."""
        family = FAMILIES[self.architecture]
        values = {
            key: getattr(self, name)
            for name, key in _keys_of(family).items()
            if name not in family.fixed
        }
        if family.windows == "none":
            values.pop("sliding_window", None)
        if family.windows == "by layer":
            values["use_sliding_window"] = self.sliding_window is not None
        if family.windows in ("by layer", "by pattern"):
            values["layer_types"] = list(self.layer_types)
        if self.rope is not None:
            values |= {"rope_theta": self.rope.theta, "rope_scaling": rotary_to_dict(self.rope)}
        if self.local_rope is not None:
            values["rope_local_base_freq"] = self.local_rope.theta
        names = {activation: name for name, activation in reversed(ACTIVATIONS.items())}
        return {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            **values,
            family.activation_key: names[self.activation],
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "torch_dtype": self.dtype,
        }


@dataclasses.dataclass
class _EndKeys:
    eos_token_id: _TokenIds = None


@dataclasses.dataclass
class _OtherKeys(_EndKeys):
    bos_token_id: _TokenIds = None
    dtype: str | None = None
    torch_dtype: str | None = None


def _keys_of(family: Family) -> dict[str, str]:
    """Return the fields whose values a family's config.json holds unchanged, and their keys there."""
    return {name: key for name, key in {**_KEYS, **family.keys}.items() if key is not None}


def _ropes(
    config: dict[str, Any], family: Family, max_positions: int
) -> tuple[Rotary | None, Rotary | None]:
    """Read `rope` and `local_rope`."""
    if not family.thetas:
        return None, None
    if len(family.thetas) == 1:
        return read_rotary(config, max_positions), None
    return read_rotary_by_layer_type(config, max_positions, (family.thetas[0], family.thetas[1]))


def _token_ids(ids: int | list[int] | None, vocab_size: int, key: str) -> tuple[int, ...]:
    listed = () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)
    if listed and max(listed) >= vocab_size:
        raise ModelFolderError(
            f"{key} must be token ids from 0 to {vocab_size - 1}, found {shorten(ids)}"
        )
    return listed


def _dtype(keys: _OtherKeys) -> str:
    stated = keys.dtype or keys.torch_dtype or "float32"
    dtype = stated.removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"dtype = {shorten(stated)} is not supported; supported are {', '.join(DTYPES)}"
        )
    return dtype
