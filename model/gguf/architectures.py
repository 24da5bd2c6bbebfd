"""The architectures of GGUF files, and what config.json would say: one row each. Imports no PyTorch.

llama.cpp fixes some numbers in its code where a config.json states them; these are in the functions here.

Source: llama.cpp, convert_hf_to_gguf.py and src/llama-model.cpp; docs/gguf.md of the ggml project.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from model.errors import ModelFolderError, UnsupportedModelError
from model.gguf.heads import head_dim, whole_rotation
from model.gguf.hybrids import (
    MAMBA2_LAYERS,
    MAMBA2_WHOLE,
    SCALES,
    bamba,
    falcon_h1,
    granite,
    granite_hybrid,
    is_bamba,
)
from model.gguf.reader import Array
from model.gguf.source import Source

_LLAMA_LAYERS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA2_LAYERS: Final = _LLAMA_LAYERS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3_LAYERS: Final = _LLAMA_LAYERS | {
    "attn_qkv": "self_attn.qkv_proj",
    "ffn_up": "mlp.gate_up_proj",
}
_QWEN35_LAYERS: Final = {it: _LLAMA_LAYERS[it] for it in _LLAMA_LAYERS if it != "ffn_norm"} | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_LFM2_LAYERS: Final = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_GRANITE4_LAYERS: Final = (
    _LLAMA_LAYERS
    | MAMBA2_LAYERS
    | {
        "ffn_gate": "shared_mlp.gate_proj",
        "ffn_up": "shared_mlp.up_proj",
        "ffn_down": "shared_mlp.output_linear",
    }
)
_FALCON_H1_LAYERS: Final = (
    _LLAMA_LAYERS
    | MAMBA2_LAYERS
    | {
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    }
)
_FALCON_H1_OUTSIDE: Final = {"output_norm": "model.final_layernorm"}
CONVOLUTIONS: Final = ("ssm_conv1d", "shortconv.conv")
"""Modules whose weight a folder has as [channels, 1, W], and GGUF as [channels, W]."""
DECAYS: Final = ("ssm_a",)
"""Modules with -exp(a) in place of a."""
VECTORS: Final = ("ssm_a", "ssm_d", "ssm_norm")
"""Modules that are vectors in a folder, and in GGUF may be matrices with a row for each head or group."""
_GEMMA_NORMS: Final = (
    "output_norm", "attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm",
)  # fmt: skip
ROPE_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that config.json has as numbers."""
_UNSUPPORTED: Final = {
    **dict.fromkeys(("clip", "mmproj"), "it is the image encoder of a model, not a language model"),
    **dict.fromkeys(("mamba", "mamba2"), "networks without attention are not served"),
    "nemotron_h": "its layers have either a mixer or an MLP",
    "nemotron_h_moe": "a mixture of experts",
    "granitemoe": "a mixture of experts",
    "jamba": "its recurrent layers are those of Mamba-1",
    "plamo2": "its Mamba layers have norms of their own",
}
"""Why some architectures are not supported."""
_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}


@dataclasses.dataclass(frozen=True)
class TiledHeads:
    """Heads of values that are stored in the order in which a repeated list of key heads would meet them.

    With G key heads, a folder has the heads of the first key head, then those of the second; GGUF the first head of
    each key head, then the second of each.

    Attributes:
        key_heads: G.
        size: rows or columns of a head.
        first: rows before those of the heads.
        columns: whether columns have the order, rather than rows.
    """

    key_heads: int
    size: int
    first: int = 0
    columns: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        name: the value of `general.architecture`.
        model_type: of config.json; the family of the model.
        hf_name: the entry of `architectures` in config.json.
        layers: the names of a layer's modules in a checkpoint, by their names in GGUF.
        permuted: modules whose rows are stored so that those that rotate together are beside each other.
        plus_one: modules of norms whose weights are stored plus 1, by their names in GGUF.
        outside: the names of modules outside the layers that differ from `OUTSIDE`.
        whole: modules that are one tensor in a folder, whose name has no `.weight` or `.bias`.
        tiled: returns the modules whose heads of values are stored in another order, see `TiledHeads`.
        some_attention: whether a list of key-value heads has 0 for layers without attention.
        is_gemma: whether float16 is too small for the activations.
        features: keys of the metadata that `more` reads, and that have no effect with other architectures only if they
            switch a feature off.
        variant: returns another row for files that have the same name of another family; else None.
        more: returns what config.json says besides the keys that all architectures have.
        integers: further keys of the metadata by those of config.json.
        numbers: as `integers`.
    """

    name: str
    model_type: str
    hf_name: str
    layers: Mapping[str, str] = dataclasses.field(default_factory=lambda: _LLAMA_LAYERS)
    permuted: tuple[str, ...] = ()
    plus_one: tuple[str, ...] = ()
    outside: Mapping[str, str] = dataclasses.field(default_factory=dict)
    whole: tuple[str, ...] = ()
    tiled: Callable[[Source], Mapping[str, TiledHeads]] = lambda _: {}
    some_attention: bool = False
    is_gemma: bool = False
    features: tuple[str, ...] = ()
    variant: Callable[[Source], Architecture | None] = lambda _: None
    more: Callable[[Source], dict[str, Any]] = lambda _: {}
    integers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _llama(source: Source) -> dict[str, Any]:
    whole_rotation(source)
    if window := source.optional_integer("llama.attention.sliding_window"):
        name = "MistralForCausalLM"
        return {"architectures": [name], "model_type": "mistral", "sliding_window": window}
    return {
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in source.tensors,
    }


def _qwen3(source: Source) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in source.tensors} | whole_rotation(source)


def _gemma2(source: Source) -> dict[str, Any]:
    arch = source.architecture
    is_27b = source.integer(f"{arch}.block_count") == _LAYERS_OF_27B[arch]
    heads = source.integer(f"{arch}.attention.head_count")
    scalar = (
        source.integer(f"{arch}.embedding_length") // max(1, heads) if is_27b else head_dim(source)
    )
    return {
        "query_pre_attn_scalar": scalar,
        "hidden_activation": "gelu_pytorch_tanh",
    } | whole_rotation(source)


def _gemma3(source: Source) -> dict[str, Any]:
    arch = source.architecture
    found = _gemma2(source)
    pattern = source.find(f"{arch}.attention.sliding_window_pattern") or 6
    if isinstance(pattern, Array):
        kinds = {True: "sliding_attention", False: "full_attention"}
        flags = source.array(pattern.key)
        found["layer_types"] = [kinds[bool(it)] for it in flags]
    else:
        found["sliding_window_pattern"] = pattern
    local = source.optional_number(f"{arch}.rope.freq_base_swa")
    return found | {"rope_local_base_freq": local or 10_000.0}


def _gemma(source: Source) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh"} | whole_rotation(source)


def _phi3(source: Source) -> dict[str, Any]:
    arch, dims = source.architecture, head_dim(source)
    rotating = source.optional_integer(f"{arch}.rope.dimension_count") or dims
    found: dict[str, Any] = {"partial_rotary_factor": rotating / dims}
    original = source.optional_integer(f"{arch}.rope.scaling.original_context_length")
    if original:
        found["original_max_position_embeddings"] = original
    return found


def _qwen35(source: Source) -> dict[str, Any]:
    arch, dims = source.architecture, head_dim(source)
    rotating = source.optional_integer(f"{arch}.rope.dimension_count") or dims
    source.find(f"{arch}.rope.dimension_sections")  # for text all sections have the same angles
    keys, values, key_dim, value_dim = _linear_heads(source)
    return {
        "partial_rotary_factor": rotating / dims,
        "full_attention_interval": source.optional_integer(f"{arch}.full_attention_interval") or 4,
        "linear_conv_kernel_dim": source.integer(f"{arch}.ssm.conv_kernel"),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
    }


def _linear_heads(source: Source) -> tuple[int, int, int, int]:
    """Return the heads of keys and of values of the gated delta rule, and the elements of a head of each.

    Raises:
        ModelFolderError: they do not fit each other.
    """
    keys, values, key_dim, inner = (
        source.integer(f"{source.architecture}.ssm.{it}")
        for it in ("group_count", "time_step_rank", "state_size", "inner_size")
    )
    if not (keys and values) or values % keys or inner % values:
        raise ModelFolderError(
            f"{source.file}: ssm.inner_size = {inner} must be a multiple of ssm.time_step_rank = {values}, and that of"
            f" ssm.group_count = {keys}"
        )
    return keys, values, key_dim, inner // values


def _qwen35_heads(source: Source) -> dict[str, TiledHeads]:
    keys, values, key_dim, value_dim = _linear_heads(source)
    if keys == values:
        return {}
    before, one = 2 * keys * key_dim, TiledHeads(keys, 1)
    return {
        **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), one),
        **dict.fromkeys(("attn_qkv", "ssm_conv1d"), TiledHeads(keys, value_dim, before)),
        "attn_gate": TiledHeads(keys, value_dim),
        "ssm_out": TiledHeads(keys, value_dim, columns=True),
    }


def _lfm2(source: Source) -> dict[str, Any]:
    counts = source.array("lfm2.attention.head_count_kv")
    kinds = {True: "full_attention", False: "conv"}
    return {
        "norm_eps": source.optional_number("lfm2.attention.layer_norm_rms_epsilon"),
        "conv_L_cache": source.integer("lfm2.shortconv.l_cache"),
        "layer_types": [kinds[bool(it)] for it in counts],
        "block_auto_adjust_ff_dim": False,
    } | whole_rotation(source)


_BAMBA: Final = Architecture(
    "granitehybrid", "bamba", "BambaForCausalLM", _FALCON_H1_LAYERS,
    outside=_FALCON_H1_OUTSIDE, permuted=("attn_q", "attn_k"), whole=MAMBA2_WHOLE, some_attention=True, more=bamba,
)  # fmt: skip
_ROWS: Final = (
    Architecture(
        "llama", "llama", "LlamaForCausalLM", permuted=("attn_q", "attn_k"), more=_llama
    ),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", more=whole_rotation),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", more=_qwen3),
    Architecture(
        "gemma", "gemma", "GemmaForCausalLM", plus_one=_GEMMA_NORMS, is_gemma=True, more=_gemma
    ),
    Architecture(
        "gemma2", "gemma2", "Gemma2ForCausalLM", _GEMMA2_LAYERS,
        plus_one=_GEMMA_NORMS, is_gemma=True, more=_gemma2,
        integers={"sliding_window": "attention.sliding_window"},
        numbers={"attn_logit_softcapping": "attn_logit_softcapping",
                 "final_logit_softcapping": "final_logit_softcapping"},
    ),
    Architecture(
        "gemma3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA2_LAYERS,
        plus_one=_GEMMA_NORMS, is_gemma=True, more=_gemma3,
        integers={"sliding_window": "attention.sliding_window"},
        numbers={"final_logit_softcapping": "final_logit_softcapping"},
    ),
    Architecture(
        "phi3", "phi3", "Phi3ForCausalLM", _PHI3_LAYERS, more=_phi3,
        integers={"sliding_window": "attention.sliding_window"},
    ),
    Architecture(
        "qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", _QWEN35_LAYERS,
        plus_one=("output_norm", "attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm"),
        whole=("ssm_a", "ssm_dt"), tiled=_qwen35_heads, some_attention=True, more=_qwen35,
    ),
    Architecture(
        "lfm2", "lfm2", "Lfm2ForCausalLM", _LFM2_LAYERS,
        outside={"token_embd_norm": "model.embedding_norm"}, some_attention=True, more=_lfm2,
    ),
    Architecture(
        "granite", "granite", "GraniteForCausalLM",
        permuted=("attn_q", "attn_k"), features=SCALES, more=granite,
    ),
    Architecture(
        "granitehybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM", _GRANITE4_LAYERS,
        permuted=("attn_q", "attn_k"), whole=MAMBA2_WHOLE, some_attention=True, features=SCALES, more=granite_hybrid,
        variant=lambda source: _BAMBA if is_bamba(source) else None,
    ),
    Architecture(
        "falcon-h1", "falcon_h1", "FalconH1ForCausalLM", _FALCON_H1_LAYERS,
        outside=_FALCON_H1_OUTSIDE, whole=MAMBA2_WHOLE, more=falcon_h1,
    ),
)  # fmt: skip
ARCHITECTURES: Final = {row.name: row for row in _ROWS}


def find_architecture(source: Source) -> Architecture:
    """Return the row of a file's architecture.

    Raises:
        ModelFolderError: the file names none.
        UnsupportedModelError: it is not supported.
    """
    name = source.architecture
    if name not in ARCHITECTURES:
        hint = f": {_UNSUPPORTED[name]}" if name in _UNSUPPORTED else ""
        raise UnsupportedModelError(
            f"{source.file}: general.architecture = {name!r:.80} is not supported in GGUF files{hint}; supported are"
            f" {', '.join(ARCHITECTURES)}"
        )
    row = ARCHITECTURES[name]
    return row.variant(source) or row
