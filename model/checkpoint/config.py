"""A checkpoint's configuration, checked when it is read.

This module does not import PyTorch, because the front end imports it.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from model.checkpoint.families import FAMILIES, LayerType, find_architecture, layer_windows
from model.checkpoint.rope_config import Positions, RopeConfig
from model.errors import ModelError, ModelFolderError, UnsupportedModelError
from model.json_input import Harmless, convert, read_json_object, refuse, shorten

DTYPES: Final = ("float32", "bfloat16", "float16")

# Keys for unsupported features, each group after the values with which its keys have no effect.
_HARMLESS: Final[Harmless] = (
    (("silu", "swish"), ("hidden_act",)),
    ((False,), ("is_encoder_decoder", "add_cross_attention", "use_mrope")),
    ((0,), ("n_routed_experts",)),
    ((0, 1), ("num_local_experts", "num_experts")),
    ((1,), ("partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")),
    ((), ("quantization_config", "compression_config", "auto_map", "attn_logit_softcapping",
          "final_logit_softcapping", "logits_soft_cap", "attention_chunk_size", "attention_multiplier",
          "no_rope_layers", "clip_qkv", "dual_chunk_attention_config")),
)  # fmt: skip
_MAX_FILE_BYTES: Final = 4 * 2**20
_Heads = Annotated[int, Meta(ge=1, le=1_024)]
_TokenId = Annotated[int, Meta(ge=0)]
_TokenIds = _TokenId | list[_TokenId] | None

_RENAMED: Final = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
_SAME_NAME: Final = (
    "vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "sliding_window", "initializer_range",
)  # fmt: skip
_KEYS: Final = _RENAMED | {name: name for name in _SAME_NAME}
"""Fields of `ModelConfig` whose values config.json holds unchanged, and their keys there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of one decoder model. The limits in the annotations apply to values read from files.

    Attributes:
        architecture: a key of `FAMILIES`.
        num_kv_heads: divides num_heads; equal to it for multi-head attention, the default; 1 for multi-query attention.
        head_dim: even; hidden_size / num_heads by default.
        attention_bias: whether the q, k and v projections have a bias.
        attention_output_bias: whether the output projection of the attention has a bias.
        mlp_bias: whether the three projections of the MLP have biases.
        qk_norm: whether queries and keys are normalized per head before the rotation (Qwen3).
        sliding_window: tokens that a sliding-window layer attends to, including the current one; None if no layer has a
            sliding window.
        layer_types: one entry per layer; by default all layers have the sliding window if there is one.
        max_position_embeddings: tokens, as stated by the checkpoint; see `max_context`.
        dtype: dtype of the checkpoint: "float32", "bfloat16" or "float16".
        eos_token_ids: all ids that end a generation, from config.json and generation_config.json.
        initializer_range: standard deviation of freshly initialized weights.

    Raises:
        ModelFolderError: the sizes of the heads do not fit each other, or LongRoPE's factors do not fit them.
    """

    architecture: str
    vocab_size: Annotated[int, Meta(ge=1, le=2**21)]
    hidden_size: Annotated[int, Meta(ge=1, le=65_536)]
    intermediate_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_layers: Annotated[int, Meta(ge=1, le=1_024)]
    num_heads: _Heads
    num_kv_heads: _Heads = 0
    head_dim: Annotated[int, Meta(ge=1)] = 0
    max_position_embeddings: Positions
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: Positions | None = None
    layer_types: tuple[LayerType, ...] = ()
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: Annotated[float, Meta(ge=0, le=10)] = 0.02

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_heads, self.num_kv_heads or self.num_heads
        if heads % kv_heads:
            raise ModelFolderError(
                f"num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
            )
        if not self.head_dim and self.hidden_size % heads:
            raise ModelFolderError(
                f"hidden_size = {self.hidden_size} must be a multiple of num_attention_heads = {heads}"
                " where head_dim is not given"
            )
        head_dim = self.head_dim or self.hidden_size // heads
        if head_dim % 2 or not 4 <= head_dim <= 1_024:
            raise ModelFolderError(
                f"head_dim must be an even number from 4 to 1024, found {head_dim}"
            )
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.rope, name)
            if self.rope.rope_type == "longrope" and len(factors) != head_dim // 2:
                raise ModelFolderError(
                    f"{name} of the rope parameters must have head_dim / 2 = {head_dim // 2} numbers,"
                    f" found {len(factors)}"
                )
        kind: LayerType = "full_attention" if self.sliding_window is None else "sliding_attention"
        layer_types = self.layer_types or (kind,) * self.num_layers
        assert len(layer_types) == self.num_layers
        defaults = {"num_kv_heads": kv_heads, "head_dim": head_dim, "layer_types": layer_types}
        for name, value in defaults.items():
            object.__setattr__(self, name, value)

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
        file, generation_file = folder / "config.json", folder / "generation_config.json"
        if not file.is_file():
            raise ModelFolderError(f"{folder} has no config.json; a model folder needs one")
        config, generation_config = (
            read_json_object(it, _MAX_FILE_BYTES) if it.is_file() else {}
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
        refuse(config, _HARMLESS)
        stated = family.defaults | {key: it for key, it in config.items() if it is not None}
        if config.get("sliding_window", 0) is None:  # null means no window, not the default
            stated.pop("sliding_window", None)
        values = {name: stated[key] for name, key in _KEYS.items() if key in stated}
        values["attention_output_bias"] = values.get("attention_bias")
        values |= {"architecture": architecture} | family.fixed
        base = convert(values, cls, _KEYS)
        window, layer_types = layer_windows(config, family, base.sliding_window, base.num_layers)
        other = convert(config, _OtherKeys)
        prefix = "generation_config.json: "
        generation = convert(generation_config or {}, _EndKeys, prefix=prefix)
        bos = _token_ids(other.bos_token_id, base.vocab_size, "bos_token_id")
        eos = _token_ids(other.eos_token_id, base.vocab_size, "eos_token_id")
        eos += _token_ids(generation.eos_token_id, base.vocab_size, prefix + "eos_token_id")
        return dataclasses.replace(
            base,
            rope=RopeConfig.from_dict(config, base.max_position_embeddings),
            sliding_window=window,
            layer_types=layer_types,
            dtype=_dtype(other),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )

    @property
    def max_context(self) -> int:
        """Maximum number of tokens in a sequence.

        It is the length that the checkpoint states. `yarn` and `dynamic` checkpoints often state the length before the
        extension; then it is that length times the factor.
        """
        stated, rope = self.max_position_embeddings, self.rope
        if rope.rope_type in ("yarn", "dynamic"):
            return max(stated, math.floor(rope.original_max_positions * rope.factor))
        return stated

    @property
    def mixes_attention(self) -> bool:
        """Whether some layers have a sliding window and others attend to all tokens."""
        return len(set(self.layer_types)) > 1

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * heads + 2 * kv_heads)
        attention += self.attention_bias * (heads + 2 * kv_heads)
        attention += (
            self.attention_output_bias * self.hidden_size + self.qk_norm * 2 * self.head_dim
        )
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layer = attention + mlp + 2 * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `config.json`, in the classic form, which all versions of transformers read."""
        family = FAMILIES[self.architecture]
        values = {
            key: getattr(self, name) for name, key in _KEYS.items() if name not in family.fixed
        }
        if family.windows == "none":
            del values["sliding_window"]
        if family.windows == "by layer":
            values["use_sliding_window"] = self.sliding_window is not None
            values["layer_types"] = list(self.layer_types)
        return {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            **values,
            "hidden_act": "silu",
            "rope_theta": self.rope.theta,
            "rope_scaling": self.rope.to_dict(),
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "torch_dtype": self.dtype,
        }

    def layer_window(self, layer: int) -> int | None:
        """Return the number of tokens that layer `layer` attends to, including the current one; None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


@dataclasses.dataclass
class _EndKeys:
    eos_token_id: _TokenIds = None


@dataclasses.dataclass
class _OtherKeys(_EndKeys):
    bos_token_id: _TokenIds = None
    dtype: str | None = None
    torch_dtype: str | None = None


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
