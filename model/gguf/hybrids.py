"""What config.json would say of hybrids with Mamba-2, and of the multipliers of Granite. Imports no PyTorch.

Source: llama.cpp, conversion/mamba.py, granite.py and falcon_h1.py; src/models/granite-hybrid.cpp, falcon-h1.cpp and
mamba-base.cpp.
"""

from __future__ import annotations

from typing import Any, Final

from model.errors import ModelFolderError, UnsupportedModelError
from model.gguf.heads import head_dim, whole_rotation
from model.gguf.source import Source

MAMBA2_LAYERS: Final = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_a": "mamba.A_log",
    "ssm_dt": "mamba.dt_bias",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
"""The names of Mamba-2's modules in a checkpoint, by their names in GGUF."""
MAMBA2_WHOLE: Final = ("ssm_a", "ssm_dt", "ssm_d")
"""Those of them that are one tensor in a folder."""
SCALES: Final = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
"""The keys of Granite's multipliers, of which 0 means none."""


def multipliers(source: Source) -> dict[str, Any]:
    """Return the multipliers of Granite; the default of the one of attention is that of other architectures."""
    attention, embedding, residual, logits = (
        source.optional_number(f"{source.architecture}.{it}") for it in SCALES
    )
    return {
        "attention_multiplier": attention or head_dim(source) ** -0.5,
        "embedding_multiplier": embedding or 1.0,
        "residual_multiplier": residual or 1.0,
        "logits_scaling": logits or 1.0,
    }


def granite(source: Source) -> dict[str, Any]:
    """Return what config.json would say of Granite, and of Granite 4 without recurrent layers.

    Raises:
        UnsupportedModelError: heads do not rotate, or in part.
    """
    # The converter states it beside `feed_forward_length`, which it equals where there are no experts.
    source.find("granite.expert_shared_feed_forward_length")
    if not _rotates(source):
        raise UnsupportedModelError(
            f"{source.file}: granite.rope.scaling.finetuned = False, which means heads that do not rotate, is not"
            " supported"
        )
    return {
        **multipliers(source),
        "attention_bias": _has_bias(source, "attn_q"),
        "mlp_bias": _has_bias(source, "ffn_gate"),
    } | whole_rotation(source)


def granite_hybrid(source: Source) -> dict[str, Any]:
    """Return what config.json would say of Granite 4 H.

    Raises:
        ModelFolderError: numbers of Mamba-2 do not fit each other.
    """
    arch = source.architecture
    counts = source.array(f"{arch}.attention.head_count_kv")
    shared = source.optional_integer(f"{arch}.expert_shared_feed_forward_length")
    return {
        **_expanded(source),
        **multipliers(source),
        "position_embedding_type": "rope" if _rotates(source) else "nope",
        "layer_types": ["attention" if it else "mamba" for it in counts],
        "num_local_experts": 0,
        "shared_intermediate_size": shared or source.integer(f"{arch}.feed_forward_length"),
        "separate_gate_and_up": True,
        "attention_bias": _has_bias(source, "attn_q"),
    }


def bamba(source: Source) -> dict[str, Any]:
    """Return what config.json would say of Bamba.

    Raises:
        ModelFolderError: numbers of Mamba-2 do not fit each other.
    """
    arch = source.architecture
    counts = source.array(f"{arch}.attention.head_count_kv")
    rotating = source.integer(f"{arch}.rope.dimension_count")
    return {
        **_expanded(source),
        "attn_layer_indices": [index for index, it in enumerate(counts) if it],
        "attn_rotary_emb": rotating,
        "partial_rotary_factor": rotating / head_dim(source),
        "attention_bias": _has_bias(source, "attn_q"),
        "mlp_bias": _has_bias(source, "ffn_gate"),
    }


def is_bamba(source: Source) -> bool:
    """Whether a file of Granite 4 H's architecture has a Bamba, of whose heads a part rotates."""
    rotating = source.optional_integer(f"{source.architecture}.rope.dimension_count")
    return _rotates(source) and rotating not in (None, head_dim(source))


def falcon_h1(source: Source) -> dict[str, Any]:
    """Return what config.json would say of Falcon-H1, whose multipliers are in the weights of a file.

    Raises:
        ModelFolderError: numbers of Mamba-2 do not fit each other.
        UnsupportedModelError: the metadata have multipliers, as in files of the first fork of llama.cpp.
    """
    others = (it for it in source.metadata if it.startswith("falcon-h1."))
    if found := sorted(
        it for it in others if it.endswith(("multiplier", "multipliers", ".has_mup"))
    ):
        raise UnsupportedModelError(
            f"{source.file}: {found[0]} is not supported: the file is older than llama.cpp's support of Falcon-H1, and"
            " its weights lack the multipliers; convert the checkpoint again"
        )
    return {
        **_mamba2(source),
        "mamba_d_ssm": source.integer("falcon-h1.ssm.inner_size"),
        "mamba_rms_norm": any(it.endswith(".ssm_norm.weight") for it in source.tensors),
        "mamba_norm_before_gate": False,
        "projectors_bias": _has_bias(source, "ssm_out"),
        "attention_bias": _has_bias(source, "attn_q"),
        "mlp_bias": _has_bias(source, "ffn_gate"),
    } | whole_rotation(source)


def _mamba2(source: Source) -> dict[str, Any]:
    arch = source.architecture
    inner, heads = (source.integer(f"{arch}.ssm.{it}") for it in ("inner_size", "time_step_rank"))
    if not heads or inner % heads:
        raise ModelFolderError(
            f"{source.file}: {arch}.ssm.inner_size = {inner} must be a multiple of {arch}.ssm.time_step_rank = {heads}"
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": source.integer(f"{arch}.ssm.state_size"),
        "mamba_n_groups": source.integer(f"{arch}.ssm.group_count"),
        "mamba_d_conv": source.integer(f"{arch}.ssm.conv_kernel"),
        "mamba_conv_bias": _has_bias(source, "ssm_conv1d"),
        "mamba_proj_bias": _has_bias(source, "ssm_in"),
    }


def _expanded(source: Source) -> dict[str, Any]:
    """Return what config.json would say of Mamba-2 whose inner size is a multiple of the hidden size."""
    arch = source.architecture
    inner, hidden = (
        source.integer(f"{arch}.{it}") for it in ("ssm.inner_size", "embedding_length")
    )
    if not hidden or inner % hidden:
        raise ModelFolderError(
            f"{source.file}: {arch}.ssm.inner_size = {inner} must be a multiple of {arch}.embedding_length = {hidden}"
        )
    return {**_mamba2(source), "mamba_expand": inner // hidden}


def _rotates(source: Source) -> bool:
    """Whether heads rotate, for which llama.cpp uses this key in files of Granite."""
    return source.flag(f"{source.architecture}.rope.scaling.finetuned", default=True)


def _has_bias(source: Source, module: str) -> bool:
    return any(it.endswith(f".{module}.bias") for it in source.tensors)
