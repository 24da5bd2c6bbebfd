"""What the config.json of a GGUF checkpoint would say. Imports no PyTorch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

from model.errors import ModelFolderError, UnsupportedModelError
from model.gguf.architectures import Architecture, find_architecture
from model.gguf.end_tokens import end_token_ids
from model.gguf.heads import head_dim
from model.gguf.reader import Array
from model.gguf.source import Source

QUANT_METHOD: Final = "gguf"
EMBEDDING: Final = "token_embd.weight"
HEAD: Final = "output.weight"
_INTEGERS: Final = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_NUMBERS: Final = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_SAMPLING: Final = "general.sampling."
_SAMPLING_NAMES: Final = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_EXPERTS: Final = "expert_count"
_NEUTRAL: Final[dict[str, tuple[int, ...]]] = {
    # Keys of features that no architecture here has, with the values that switch them off.
    _EXPERTS: (0,),
    "attention.scale": (0,), "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.causal": (1,),
    "pooling_type": (0,), "attention.temperature_scale": (0,), "attention.temperature_length": (0,),
    "use_parallel_residual": (0,), "n_layer_dense_lead": (0,), "nextn_predict_layers": (0,),
}  # fmt: skip
_HARMLESS: Final = (
    "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.dimension_count", "attention.key_length_swa",
    "attention.value_length_swa", "rope.dimension_count_swa", "attention.layer_norm_epsilon", "expert_used_count",
)  # fmt: skip
"""Keys that say what other keys or the tensors say, or that belong to features that are off."""
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def to_config(source: Source) -> dict[str, Any]:
    """Return the content of a config.json that describes the model of a file.

    Raises:
        ModelFolderError: a value or a tensor is missing or wrong.
        UnsupportedModelError: the architecture or a feature is not supported.
    """
    architecture = find_architecture(source)
    arch = architecture.name
    _refuse_features(source, architecture)
    config: dict[str, Any] = {
        "architectures": [architecture.hf_name],
        "model_type": architecture.model_type,
        "vocab_size": _vocabulary(source),
        "head_dim": head_dim(source),
        "tie_word_embeddings": HEAD not in source.tensors,
    }
    for key, stated in (_INTEGERS | {**architecture.integers}).items():
        found = source.optional_integer(f"{arch}.{stated}")
        if found is None and key in _INTEGERS:
            source.integer(f"{arch}.{stated}")
        config[key] = found
    config["num_key_value_heads"] = source.optional_integer(
        f"{arch}.attention.head_count_kv", *((0,) if architecture.some_attention else ())
    )
    for key, stated in (_NUMBERS | {**architecture.numbers}).items():
        config[key] = source.optional_number(f"{arch}.{stated}")
    config |= architecture.more(source)
    if rope := _rope_scaling(source):
        config["rope_scaling"] = rope
    config |= _dtypes(source, architecture)
    begins, ends = _usual_ids(source, config["vocab_size"])
    config |= {"bos_token_id": begins[0] if begins else None, "eos_token_id": ends or None}
    return {key: it for key, it in config.items() if it is not None or key == "sliding_window"}


def without_effect(source: Source) -> list[str]:
    """Return what the metadata say and `to_config` leaves out, although it may matter.

    Raises:
        ModelError: as `to_config`.
    """
    vocabulary = to_config(source)["vocab_size"]
    arch = source.architecture
    unread = source.unread(f"{arch}.")
    begins, ends = _usual_ids(source)
    return [
        *(key for key in unread if key.removeprefix(f"{arch}.") not in _HARMLESS),
        *(f"the token {it} of {vocabulary}" for it in begins + ends if it >= vocabulary),
    ]


def _usual_ids(source: Source, vocabulary: int | None = None) -> tuple[list[int], list[int]]:
    """Return the token that begins a text, and those that end one; only those below `vocabulary` if it is given."""
    begins = source.optional_integer("tokenizer.ggml.bos_token_id")
    found = ([] if begins is None else [begins]), end_token_ids(source)
    first, last = ([it for it in ids if vocabulary is None or it < vocabulary] for ids in found)
    return first, last


def to_generation_config(source: Source) -> dict[str, Any]:
    """Return the content of a generation_config.json: the sampling parameters that the file recommends, if any."""
    found = {
        key.removeprefix(_SAMPLING): value
        for key, value in source.metadata.items()
        if key.startswith(_SAMPLING) and not isinstance(value, Array)
    }
    return {_SAMPLING_NAMES.get(name, name): it for name, it in found.items()}


def _vocabulary(source: Source) -> int:
    entry = source.tensors.get(EMBEDDING)
    if entry is None or len(entry.shape) != 2:
        raise ModelFolderError(
            f"{source.file} has no matrix {EMBEDDING}, so it is no whole language model"
        )
    return entry.shape[0]


def _refuse_features(source: Source, architecture: Architecture) -> None:
    for name, neutral in _NEUTRAL.items():
        if name in architecture.features:
            continue
        key = f"{architecture.name}.{name}"
        found = source.find(key)
        if found is not None and found not in neutral:
            why = ": a mixture of experts" * (name == _EXPERTS)
            raise UnsupportedModelError(
                f"{source.file}: {key} = {found!r:.80} is not supported{why}"
            )


def _rope_scaling(source: Source) -> dict[str, Any] | None:
    """Return the value of `rope_scaling`; None if positions are not scaled."""
    arch = f"{source.architecture}.rope.scaling"
    kind = source.text(f"{arch}.type", "none")
    old = source.optional_number(f"{source.architecture}.rope.scale_linear")
    factor = source.optional_number(f"{arch}.factor") or old or 1.0
    if kind == "none" and factor != 1 and old:
        kind = "linear"  # in files of 2023
    original = source.optional_integer(f"{arch}.original_context_length")
    attention = source.optional_number(f"{arch}.attn_factor")
    lists = [
        source.vector(name) if name in source.tensors else None
        for name in ("rope_factors_short.weight", "rope_factors_long.weight", "rope_freqs.weight")
    ]
    if (lists[0] is None) != (lists[1] is None):
        raise ModelFolderError(
            f"{source.file} has only one of rope_factors_short.weight and rope_factors_long.weight"
        )
    if lists[0] is not None:
        return {
            "rope_type": "longrope", "short_factor": lists[0], "long_factor": lists[1],
            **({} if attention is None else {"attention_factor": attention}),
        }  # fmt: skip
    if lists[2] is not None and any(it != 1 for it in lists[2]):
        # Llama 3's scaling, whose factors a file has without the numbers that they follow from.
        if kind not in ("none", "llama3", "linear") or factor != 1:
            raise UnsupportedModelError(
                f"{source.file}: rope_freqs.weight beside {arch}.type = {kind!r:.40} is not supported"
            )
        return {
            "rope_type": "longrope", "short_factor": lists[2], "long_factor": lists[2], "attention_factor": 1.0,
        }  # fmt: skip
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found = {"rope_type": "yarn", "factor": factor}
        if original:
            found["original_max_position_embeddings"] = original
        if attention not in (None, 1.0):
            growth = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            found["attention_factor"] = attention * growth
        return found
    raise UnsupportedModelError(
        f"{source.file}: {arch}.type = {kind!r:.80} is not supported; supported are none, linear, yarn, and factors in"
        " tensors"
    )


def _dtypes(source: Source, architecture: Architecture) -> dict[str, Any]:
    """Return the dtype of the weights, and how most of the quantized ones are stored."""
    quantized: Counter[str] = Counter()
    full: Counter[str] = Counter()
    for name, entry in source.tensors.items():
        if len(entry.shape) == 2 and name.startswith("blk."):
            (full if entry.kind.form is None else quantized)[entry.kind.name] += entry.num_bytes
    if quantized:
        (name, _), *_ = quantized.most_common(1)
        # Activations of most models that were trained in bfloat16 do not fit into float16.
        return {
            "torch_dtype": "bfloat16",
            "quantization_config": {"quant_method": QUANT_METHOD, "format": name},
        }
    ((name, _), *_) = full.most_common(1) or [("F32", 0)]
    dtype = "bfloat16" if architecture.is_gemma and name == "F16" else _DTYPES[name]
    return {"torch_dtype": dtype}
