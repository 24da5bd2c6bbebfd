"""Asks the kernels how they would attend for a model. Knows the model's shape, not its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.explain.plan import Explanation, explain
from model.network.single_launch import unsupported

if TYPE_CHECKING:
    from kernels import GPUArch
    from model.network.decoder import DecoderLM


def explain_model(
    model: DecoderLM, block_size: int, arch: GPUArch, kv_dtype: str | None = None
) -> Explanation:
    """Explain the attention of every phase and kind of layer, and how one sequence is decoded.

    Args:
        model: on any device; a model on `meta` has no weights and will do.
        block_size: tokens of a block of the KV cache.
        arch: where it would run.
        kv_dtype: of a quantised KV cache; None for one of the model's dtype.

    Raises:
        NoKernelError: no kernel takes the model's attention there; lists every reason.
    """
    problems = model.attention_problems(block_size, kv_dtype)
    weights = model.weight_dtype
    reasons = unsupported(model, arch)
    return explain(
        problems,
        arch,
        model.config.max_context,
        weight_dtype=None if weights is None else str(weights).removeprefix("torch."),
        one_sequence=f"layer by layer: {'; '.join(reasons)}" if reasons else "in one launch",
    )
