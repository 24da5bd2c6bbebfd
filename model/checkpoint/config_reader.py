"""Reads `config.json` as what it is: a file from outside.

Every value is typed and bounded before it is believed, and whatever Tessera cannot compute is
refused by name before any weight is opened. Knows no tensors.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Final

from model.checkpoint.config import LayerType, ModelConfig, RopeConfig
from model.checkpoint.json_values import Values, read_json_object, shorten
from model.errors import ModelFolderError, UnsupportedModelError


@dataclasses.dataclass(frozen=True)
class Family:
    """What one architecture fixes, and what its absent keys mean.

    The defaults are those of the family's configuration class in transformers, because
    `config.json` files leave out what equals them.
    """

    model_type: str
    qkv_bias: bool | None
    """None: `attention_bias` decides, and governs the output projection as well."""
    default_head_dim: int | None = None
    default_sliding_window: int | None = None
    qk_norm: bool = False
    has_mlp_bias: bool = False
    slides_by_layer: bool = False


FAMILIES: Final = {
    "LlamaForCausalLM": Family("llama", qkv_bias=None, has_mlp_bias=True),
    "MistralForCausalLM": Family("mistral", qkv_bias=False, default_sliding_window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, slides_by_layer=True),
    "Qwen3ForCausalLM": Family(
        "qwen3", qkv_bias=None, default_head_dim=128, qk_norm=True, slides_by_layer=True
    ),
}
ARCHITECTURES: Final = tuple(FAMILIES)
ROPE_TYPES: Final = ("default", "linear", "dynamic", "yarn", "llama3")
DTYPES: Final = ("float32", "bfloat16", "float16")

_MAX_FILE_BYTES: Final = 4 * 2**20
_MAX_POSITIONS: Final = 2**24

# Keys that change the computation, and the values under which they do not.
_REFUSED_KEYS: Final[dict[str, tuple[Any, ...]]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "auto_map": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "n_routed_experts": (None, 0),
    "partial_rotary_factor": (None, 1),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "logit_scale": (None, 1),
    "no_rope_layers": (None,),
    "clip_qkv": (None,),
    "dual_chunk_attention_config": (None,),
    "use_mrope": (None, False),
}


def read_folder(path: Path) -> ModelConfig:
    """Read and check the configuration files of the checkpoint folder `path`.

    Raises:
        ModelFolderError: a file is missing or broken, or a value cannot be used.
        UnsupportedModelError: the architecture or a feature is not supported.
    """
    if not path.is_dir():
        raise ModelFolderError(f"{path} is not a folder; a model is a folder with a config.json")
    file = path / "config.json"
    if not file.is_file():
        raise ModelFolderError(f"{path} has no config.json; a model folder needs one")
    config = read_json_object(file, _MAX_FILE_BYTES)
    generation_file = path / "generation_config.json"
    generation = (
        read_json_object(generation_file, _MAX_FILE_BYTES) if generation_file.is_file() else {}
    )
    try:
        return parse(config, generation)
    except ModelFolderError as error:
        raise ModelFolderError(f"{file}: {error}") from None
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file}: {error}") from None


def parse(config: dict[str, Any], generation_config: dict[str, Any]) -> ModelConfig:
    """Check the content of `config.json` and build the configuration from it.

    Raises:
        ModelFolderError: a value is missing, of the wrong type or outside its limits.
        UnsupportedModelError: the architecture or a feature is not supported.
    """
    values = Values(config)
    architecture = _architecture(values)
    family = FAMILIES[architecture]
    _refuse_unsupported(values)

    hidden_size = values.integer("hidden_size", 1, 65_536)
    num_heads = values.integer("num_attention_heads", 1, 1_024)
    num_layers = values.integer("num_hidden_layers", 1, 1_024)
    vocab_size = values.integer("vocab_size", 1, 2**21)
    max_positions = values.integer("max_position_embeddings", 1, _MAX_POSITIONS)
    governed_bias = (
        values.flag("attention_bias", default=False) if family.qkv_bias is None else False
    )
    sliding_window, layer_types = _sliding(values, family, num_layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=values.integer("intermediate_size", 1, 2**20),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(values, num_heads),
        head_dim=_head_dim(values, family, hidden_size, num_heads),
        max_position_embeddings=max_positions,
        rms_norm_eps=values.number_or("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=_rope(values, max_positions),
        attention_bias=governed_bias if family.qkv_bias is None else family.qkv_bias,
        attention_output_bias=governed_bias,
        mlp_bias=family.has_mlp_bias and values.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        tie_word_embeddings=values.flag("tie_word_embeddings", default=False),
        sliding_window=sliding_window,
        layer_types=layer_types,
        dtype=_dtype(values),
        bos_token_id=next(iter(values.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=tuple(
            dict.fromkeys(
                values.token_ids("eos_token_id", vocab_size)
                + Values(generation_config, "generation_config.json: ").token_ids(
                    "eos_token_id", vocab_size
                )
            )
        ),
        initializer_range=values.number_or("initializer_range", 0.0, 10.0, 0.02),
    )


def _architecture(values: Values) -> str:
    named = values.values.get("architectures")
    model_type = values.text("model_type")
    if named is not None and not (
        isinstance(named, list) and all(isinstance(n, str) for n in named)
    ):
        raise ModelFolderError(f"architectures must be a list of texts, found {shorten(named)}")
    if named:
        name = str(named[0])
    elif model_type is not None:
        by_type = {family.model_type: key for key, family in FAMILIES.items()}
        name = by_type.get(model_type, model_type)
    else:
        raise ModelFolderError("architectures and model_type are both missing")
    supported = ", ".join(ARCHITECTURES)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {shorten(name)} is not supported; supported are {supported}"
        )
    if model_type not in (None, FAMILIES[name].model_type):
        raise UnsupportedModelError(
            f"architecture {name} with model_type {shorten(model_type)} is not supported;"
            f" {name} goes with model_type '{FAMILIES[name].model_type}'"
        )
    return name


def _refuse_unsupported(values: Values) -> None:
    for key, harmless in _REFUSED_KEYS.items():
        value = values.values.get(key)
        if not any(value is h or (h is not None and value == h) for h in harmless):
            raise UnsupportedModelError(
                f"{key} = {shorten(value)} is not supported; pick another checkpoint"
            )
    activation = values.text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"hidden_act = {shorten(activation)} is not supported; supported is 'silu'"
        )


def _num_kv_heads(values: Values, num_heads: int) -> int:
    num_kv_heads = values.integer_or("num_key_value_heads", 1, 1_024, num_heads)
    if num_heads % num_kv_heads:
        raise ModelFolderError(
            f"num_attention_heads = {num_heads} must be a multiple of"
            f" num_key_value_heads = {num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(values: Values, family: Family, hidden_size: int, num_heads: int) -> int:
    if values.values.get("head_dim") is None and family.default_head_dim is None:
        if hidden_size % num_heads:
            raise ModelFolderError(
                f"hidden_size = {hidden_size} must be a multiple of"
                f" num_attention_heads = {num_heads} where head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    else:
        head_dim = values.integer_or("head_dim", 4, 1_024, family.default_head_dim or 0)
    if head_dim % 2 or not 4 <= head_dim <= 1_024:
        raise ModelFolderError(f"head_dim must be an even number from 4 to 1024, found {head_dim}")
    return head_dim


def _dtype(values: Values) -> str:
    stated = values.text("dtype") or values.text("torch_dtype") or "float32"
    dtype = stated.removeprefix("torch.")
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"dtype = {shorten(stated)} is not supported; supported are {', '.join(DTYPES)}"
        )
    return dtype


def _sliding(
    values: Values, family: Family, num_layers: int
) -> tuple[int | None, tuple[LayerType, ...]]:
    """Resolve the attention window and which layers have it.

    Source: transformers 5, `__post_init__` of MistralConfig, Qwen2Config and Qwen3Config: Mistral
    slides everywhere, Qwen only with `use_sliding_window`, from layer `max_window_layers` on
    unless `layer_types` lists every layer.
    """
    window: int | None = None
    if values.values.get("sliding_window") is not None:
        window = values.integer("sliding_window", 1, _MAX_POSITIONS)
    elif "sliding_window" not in values.values:
        window = 4096 if family.slides_by_layer else family.default_sliding_window
    if family.slides_by_layer:
        if not values.flag("use_sliding_window", default=False):
            window = None
        first = values.integer_or("max_window_layers", 0, 2**31, 28)
    else:
        first = 0
    slides = [window is not None and layer >= first for layer in range(num_layers)]
    types: tuple[LayerType, ...] = tuple(
        "sliding_attention" if slide else "full_attention" for slide in slides
    )
    if family.model_type == "llama" and window is not None:
        raise UnsupportedModelError(
            f"sliding_window = {window} is not supported with LlamaForCausalLM;"
            " MistralForCausalLM is this architecture with a sliding window"
        )
    types = _explicit_layer_types(values, family, types)
    if "sliding_attention" in types and window is None:
        raise ModelFolderError(
            "layer_types names sliding_attention, but sliding_window is missing or"
            " use_sliding_window is false"
        )
    return (window if "sliding_attention" in types else None), types


def _explicit_layer_types(
    values: Values, family: Family, derived: tuple[LayerType, ...]
) -> tuple[LayerType, ...]:
    stated = values.values.get("layer_types")
    if stated is None:
        return derived
    if not isinstance(stated, list) or len(stated) != len(derived):
        raise ModelFolderError(
            f"layer_types must be a list of num_hidden_layers = {len(derived)} texts,"
            f" found {shorten(stated)}"
        )
    types: list[LayerType] = []
    for kind in stated:
        if kind == "full_attention":
            types.append("full_attention")
        elif kind == "sliding_attention":
            types.append("sliding_attention")
        else:
            raise UnsupportedModelError(
                f"layer type {shorten(kind)} is not supported; supported are"
                " full_attention, sliding_attention"
            )
    if not family.slides_by_layer and tuple(types) != derived:
        raise UnsupportedModelError(
            f"layer_types that differ from {derived[0]} everywhere are not supported"
            f" with model_type '{family.model_type}'"
        )
    return tuple(types)


def _rope(values: Values, max_positions: int) -> RopeConfig:
    """Resolve the rotation parameters from either form of the file.

    Source: transformers 5, `modeling_rope_utils.py`: precedence of the keys and the defaults.
    """
    key = "rope_scaling" if values.values.get("rope_scaling") else "rope_parameters"
    fields = values.object(key)
    if any(kind in fields for kind in ("full_attention", "sliding_attention")):
        raise UnsupportedModelError(
            f"{key} per layer type is not supported; one set for all layers is"
        )
    rope = Values(fields, f"{key}.")
    rope_type = rope.text("rope_type") or rope.text("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {shorten(rope_type)} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if rope.number_or("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{key}.partial_rotary_factor = {fields['partial_rotary_factor']} is not supported;"
            " supported is 1"
        )
    if fields.get("mrope_section") is not None:
        raise UnsupportedModelError(f"{key}.mrope_section is not supported")
    theta_from = rope if fields.get("rope_theta") is not None else values
    theta = theta_from.number_or("rope_theta", 2.0, 1e12, 10_000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig("linear", theta, _factor(rope))
    if rope_type == "dynamic":
        return RopeConfig("dynamic", theta, _factor(rope), max_positions)
    original_from = values if values.values.get("original_max_position_embeddings") else rope
    original = original_from.integer_or(
        "original_max_position_embeddings", 1, _MAX_POSITIONS, max_positions
    )
    if rope_type == "yarn":
        return _yarn(rope, theta, original, max_positions)
    low = rope.number("low_freq_factor", 1e-6, 1e6)
    high = rope.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        raise ModelFolderError(
            f"{key}.high_freq_factor = {high:g} must be greater than low_freq_factor = {low:g}"
        )
    return RopeConfig("llama3", theta, _factor(rope), original, low, high)


def _factor(rope: Values) -> float:
    return rope.number("factor", 1.0, 1e6)


def _yarn(rope: Values, theta: float, original: int, max_positions: int) -> RopeConfig:
    """Resolve YaRN's fields, among them the factor on cosine and sine.

    Source: YaRN (arXiv 2309.00071) section 3.4, 0.1 ln(s) + 1; `mscale` and `mscale_all_dim` as in
    transformers 5, `modeling_rope_utils.py`, `_compute_yarn_parameters`.
    """
    factor = max_positions / original if rope.values.get("factor") is None else _factor(rope)
    mscale = rope.number_or("mscale", 0.0, 1e3, 0.0)
    mscale_all_dim = rope.number_or("mscale_all_dim", 0.0, 1e3, 0.0)
    log_factor = math.log(factor) if factor > 1 else 0.0
    attention_factor = 0.1 * log_factor + 1.0
    if mscale and mscale_all_dim:
        attention_factor = (0.1 * mscale * log_factor + 1.0) / (
            0.1 * mscale_all_dim * log_factor + 1.0
        )
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=rope.number_or("attention_factor", 0.0, 1e3, attention_factor),
        beta_fast=rope.number_or("beta_fast", 0.0, 1e6, 32.0) or 32.0,
        beta_slow=rope.number_or("beta_slow", 0.0, 1e6, 1.0) or 1.0,
        truncate=rope.flag("truncate", default=True),
    )
