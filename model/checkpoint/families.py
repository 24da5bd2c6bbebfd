"""Model families: the properties that an architecture has beyond its `config.json`.

To add a family, add an entry to `FAMILIES`. Tensor names that differ from Llama's belong in
`model.checkpoint.tensor_names`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta

from model.errors import ModelFolderError, UnsupportedModelError
from model.json_input import Harmless, convert, refuse, shorten

LayerType = Literal["full_attention", "sliding_attention"]
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""As in `kernels.norms.pytorch`, which this module does not import, because that imports PyTorch."""

ACTIVATIONS: Final[dict[str, ActivationName]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
"""The activations by their names in config.json; the first name of each is the one that is written."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model_type: the value of the key `model_type` for this architecture.
        windows: which layers have a sliding window: "none", "all", "by layer", as the keys `use_sliding_window`,
            `max_window_layers` and `layer_types` state, or "by pattern", as `layer_types` or
            `sliding_window_pattern` state.
        fixed: fields of `ModelConfig` that the architecture determines, regardless of config.json.
        defaults: values of absent keys. They equal the defaults of the family's configuration class in transformers,
            because files omit values that equal them.
        keys: fields of `ModelConfig` that have another key than Llama's, and their keys; None for no key.
        activation_key: the key of the activation.
        activations: its supported values, the default first.
        window_pattern: "by pattern": each layer whose number, counted from 1, is a multiple of this attends to all
            tokens; the default of `sliding_window_pattern`.
        thetas: the defaults of the bases of the rotary embedding of layers that attend to all tokens, and of layers
            with a sliding window; one base for both kinds of layers. Empty for learned positions.
        inner_ratio: intermediate size per hidden size where the file states no intermediate size; 0: it must.
        harmless: further keys of unsupported features, as for `model.json_input.refuse`.
        hidden_size_keys: keys that, where present, must state the hidden size.
        stacks_qkv: whether checkpoints store the q, k and v projections as one tensor.
    """

    model_type: str
    windows: Literal["none", "all", "by layer", "by pattern"]
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    activation_key: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    window_pattern: int = 1
    thetas: tuple[float, ...] = (10_000.0,)
    inner_ratio: int = 0
    harmless: Harmless = ()
    hidden_size_keys: tuple[str, ...] = ()
    stacks_qkv: bool = False


_NO_BIAS: Final = {"attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
_WINDOW: Final = {"sliding_window": 4096}
_TIED: Final = {"tie_word_embeddings": True}
_LAYER_NORMS: Final = {"norm": "layer", "gated_mlp": False}
_NO_KEYS: Final = dict.fromkeys(("num_kv_heads", "head_dim", "sliding_window"))
_GELUS: Final = ("gelu_pytorch_tanh", "gelu_new", "gelu")
_GEMMA: Final = {
    "mlp_bias": False,
    "post_norms": True,
    "norms_add_one": True,
    "scale_embeddings": True,
}
_GEMMA_DEFAULTS: Final = (
    _TIED | _WINDOW | {"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256}
)
_GEMMA_KEYS: Final = {
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "logit_softcap": "final_logit_softcapping",
}

FAMILIES: Final = {
    "LlamaForCausalLM": Family("llama", "none"),
    "MistralForCausalLM": Family("mistral", "all", _NO_BIAS, _WINDOW),
    "Qwen2ForCausalLM": Family("qwen2", "by layer", _NO_BIAS | {"attention_bias": True}, _WINDOW),
    "Qwen3ForCausalLM": Family(
        "qwen3", "by layer", {"mlp_bias": False, "qk_norm": True}, _WINDOW | {"head_dim": 128}
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        "by pattern",
        _GEMMA,
        _GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        _GEMMA_KEYS | {"attention_softcap": "attn_logit_softcapping"},
        activation_key="hidden_activation",
        activations=_GELUS,
        window_pattern=2,
        harmless=(((False,), ("use_bidirectional_attention",)),),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        "by pattern",
        _GEMMA | {"qk_norm": True},
        _GEMMA_DEFAULTS,
        _GEMMA_KEYS,
        activation_key="hidden_activation",
        activations=_GELUS,
        window_pattern=6,
        thetas=(1_000_000.0, 10_000.0),
        harmless=(((False,), ("use_bidirectional_attention",)),),
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        "none",
        _LAYER_NORMS | dict.fromkeys(_NO_BIAS, True),
        _TIED,
        _NO_KEYS
        | {
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "norm_eps": "layer_norm_epsilon",
        },
        activation_key="activation_function",
        stacks_qkv=True,
        activations=("gelu_new", "gelu_pytorch_tanh", "gelu", "relu"),
        thetas=(),
        inner_ratio=4,
        harmless=(
            ((True,), ("scale_attn_weights",)),
            ((False,), ("scale_attn_by_inverse_layer_idx",)),
        ),
    ),
    "OPTForCausalLM": Family(
        "opt",
        "none",
        _LAYER_NORMS | {"position_offset": 2, "norm_eps": 1e-5},
        _TIED | {"enable_bias": True},
        _NO_KEYS
        | {
            "intermediate_size": "ffn_dim",
            "norm_eps": None,
            "attention_bias": "enable_bias",
            "mlp_bias": "enable_bias",
            "initializer_range": "init_std",
        },
        activation_key="activation_function",
        activations=("relu", "gelu_new", "gelu_pytorch_tanh", "gelu"),
        thetas=(),
        harmless=(
            ((True,), ("do_layer_norm_before", "layer_norm_elementwise_affine")),
            ((False,), ("_remove_final_layer_norm",)),
        ),
        hidden_size_keys=("word_embed_proj_dim",),
    ),
}
"""Supported families by architecture name."""


def find_activation(config: dict[str, Any], family: Family) -> ActivationName:
    """Return the activation of the MLPs.

    Raises:
        UnsupportedModelError: the family's models do not have this activation, or none is known by this name.
    """
    refuse(config, ((family.activations, (family.activation_key,)),))
    return ACTIVATIONS[config.get(family.activation_key) or family.activations[0]]


@dataclasses.dataclass
class _Names:
    architectures: list[str] | None = None
    model_type: str | None = None


def find_architecture(config: dict[str, Any]) -> str:
    """Return the architecture that `config.json` names, a key of `FAMILIES`.

    Raises:
        ModelFolderError: it names no architecture.
        UnsupportedModelError: the architecture is not supported.
    """
    names = convert(config, _Names)
    model_type = names.model_type
    if not names.architectures and model_type is None:
        raise ModelFolderError("architectures and model_type are both missing")
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    name = (
        names.architectures[0] if names.architectures else by_type.get(model_type or "", model_type)
    )
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {shorten(name)} is not supported; supported are {', '.join(FAMILIES)}"
        )
    if model_type not in (None, FAMILIES[name].model_type):
        raise UnsupportedModelError(
            f"architecture {name} with model_type {shorten(model_type)} is not supported;"
            f" {name} goes with model_type '{FAMILIES[name].model_type}'"
        )
    return name


@dataclasses.dataclass
class _WindowKeys:
    use_sliding_window: bool | None = None
    max_window_layers: Annotated[int, Meta(ge=0)] | None = None
    sliding_window_pattern: Annotated[int, Meta(ge=1)] | None = None
    layer_types: list[str] | None = None


def layer_windows(
    config: dict[str, Any], family: Family, window: int | None, num_layers: int
) -> tuple[int | None, tuple[LayerType, ...]]:
    """Determine which layers have the sliding window.

    Args:
        config: the content of config.json.
        family: the family of its architecture.
        window: the value of `sliding_window` there, or the family's default.
        num_layers: number of layers of the model.

    Returns:
        The window in tokens, None if no layer has it, and the type of each layer.

    Raises:
        ModelFolderError: a value is of the wrong type or contradicts another one.
        UnsupportedModelError: the family does not support these windows or layer types.

    Source: transformers 5, `__post_init__` of the families' configuration classes.
    """
    keys, first = convert(config, _WindowKeys), 0
    if family.windows == "none" and window is not None:
        raise UnsupportedModelError(
            f"sliding_window = {window} is not supported with model_type '{family.model_type}';"
            " MistralForCausalLM is the Llama architecture with a sliding window"
        )
    if family.windows == "by layer":
        window = window if keys.use_sliding_window else None
        first = 28 if keys.max_window_layers is None else keys.max_window_layers
    # Every layer whose number, counted from 1, is a multiple of `pattern` attends to all tokens.
    pattern = num_layers + 1
    if family.windows == "by pattern":
        pattern = keys.sliding_window_pattern or family.window_pattern
    types: tuple[LayerType, ...] = tuple(
        "sliding_attention"
        if window is not None and layer >= first and (layer + 1) % pattern
        else "full_attention"
        for layer in range(num_layers)
    )
    if keys.layer_types is not None:
        types = _stated_types(keys.layer_types, family, types)
    if "sliding_attention" not in types:
        return None, types
    if window is None:
        raise ModelFolderError(
            "layer_types names sliding_attention, but sliding_window is missing or"
            " use_sliding_window is false"
        )
    return window, types


def _stated_types(
    stated: list[str], family: Family, derived: tuple[LayerType, ...]
) -> tuple[LayerType, ...]:
    if len(stated) != len(derived):
        raise ModelFolderError(
            f"layer_types must be a list of num_hidden_layers = {len(derived)} entries,"
            f" found {shorten(stated)}"
        )
    types: tuple[LayerType, ...] = get_args(LayerType)
    if unknown := [kind for kind in stated if kind not in types]:
        raise UnsupportedModelError(
            f"layer type {shorten(unknown[0])} is not supported; supported are {', '.join(types)}"
        )
    if family.windows in ("none", "all") and tuple(stated) != derived:
        raise UnsupportedModelError(
            f"layer_types that differ from {derived[0]} everywhere are not supported"
            f" with model_type '{family.model_type}'"
        )
    return tuple(types[types.index(kind)] for kind in stated)
