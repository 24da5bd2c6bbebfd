"""The architectures of GGUF files, and what config.json would say: one row each. Imports no PyTorch.

llama.cpp fixes some numbers in its code where a config.json states them; these are in the functions here.

Source: llama.cpp, convert_hf_to_gguf.py and src/llama-model.cpp; docs/gguf.md of the ggml project.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from model.errors import ModelFolderError, UnsupportedModelError
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
_GEMMA_NORMS: Final = (
    "output_norm", "attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm",
)  # fmt: skip
ROPE_FACTORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that config.json has as numbers."""
_LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}


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
        is_gemma: whether float16 is too small for the activations.
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
    is_gemma: bool = False
    more: Callable[[Source], dict[str, Any]] = lambda _: {}
    integers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _llama(source: Source) -> dict[str, Any]:
    _whole_rotation(source)
    if window := source.optional_integer("llama.attention.sliding_window"):
        name = "MistralForCausalLM"
        return {"architectures": [name], "model_type": "mistral", "sliding_window": window}
    return {
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in source.tensors,
    }


def _qwen3(source: Source) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in source.tensors} | _whole_rotation(source)


def _whole_rotation(source: Source) -> dict[str, Any]:
    """Check that whole heads rotate, and return nothing."""
    arch, dims = source.architecture, head_dim(source)
    rotating = source.optional_integer(f"{arch}.rope.dimension_count")
    if rotating not in (None, dims):
        raise UnsupportedModelError(
            f"{source.file}: {arch}.rope.dimension_count = {rotating} is not supported with heads of {dims} dimensions"
        )
    return {}


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
    } | _whole_rotation(source)


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
    return {"hidden_activation": "gelu_pytorch_tanh"} | _whole_rotation(source)


def _phi3(source: Source) -> dict[str, Any]:
    arch, dims = source.architecture, head_dim(source)
    rotating = source.optional_integer(f"{arch}.rope.dimension_count") or dims
    found: dict[str, Any] = {"partial_rotary_factor": rotating / dims}
    original = source.optional_integer(f"{arch}.rope.scaling.original_context_length")
    if original:
        found["original_max_position_embeddings"] = original
    return found


_ROWS: Final = (
    Architecture(
        "llama", "llama", "LlamaForCausalLM", permuted=("attn_q", "attn_k"), more=_llama
    ),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", more=_whole_rotation),
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
        hint = "; it is the image encoder of a model, not a language model" * (
            name in ("clip", "mmproj")
        )
        raise UnsupportedModelError(
            f"{source.file}: general.architecture = {name!r:.80} is not supported in GGUF files{hint}; supported are"
            f" {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def head_dim(source: Source) -> int:
    """Return the elements of a head of queries, which are those of keys and values too.

    Raises:
        ModelFolderError: the metadata do not tell.
        UnsupportedModelError: values have another number.
    """
    arch = source.architecture
    heads = source.integer(f"{arch}.attention.head_count")
    hidden = source.integer(f"{arch}.embedding_length")
    if not heads:
        raise ModelFolderError(
            f"{source.file}: {arch}.attention.head_count must be at least 1, found 0"
        )
    dims = source.optional_integer(f"{arch}.attention.key_length") or hidden // heads
    values = source.optional_integer(f"{arch}.attention.value_length") or dims
    if values != dims:
        raise UnsupportedModelError(
            f"{source.file}: values of {values} dimensions beside keys of {dims} are not supported"
        )
    return dims
