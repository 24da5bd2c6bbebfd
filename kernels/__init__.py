"""The door to the kernels: paged attention, dense attention and the fused ops.

Knows tensors and devices, nothing of tokens, requests or models.
Dimensions: B sequences, T tokens of the step, H query heads, K key-value heads, D head dim,
N blocks, S block size.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, cast

import torch

from kernels import plan as _plan
from kernels.arch import GPUArch, detect
from kernels.attention.torch_dense import flash_attention as _flash_attention
from kernels.attention.torch_write_kv import write_kv as _write_kv
from kernels.errors import KernelError, NoKernelError, ShapeError
from kernels.fused.torch_ops import apply_rope, rms_norm, rope_tables, silu_and_mul
from kernels.plan import AttentionPlan, AttentionProblem, PagedBatch, Phase, Selection
from kernels.registry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.plan import AttentionKernelFactory, KernelSpec

__all__ = [
    "AttentionPlan",
    "AttentionProblem",
    "GPUArch",
    "KernelError",
    "NoKernelError",
    "PagedBatch",
    "Phase",
    "Selection",
    "ShapeError",
    "apply_rope",
    "decode_attention",
    "detect",
    "flash_attention",
    "plan_attention",
    "prefill_attention",
    "rms_norm",
    "rope_tables",
    "select",
    "silu_and_mul",
    "write_kv",
]

_SLOT_DTYPES = (torch.int32, torch.int64)

_logger = logging.getLogger(__name__)


def select(
    problem: AttentionProblem, arch: GPUArch, registry: Sequence[KernelSpec] = REGISTRY
) -> Selection:
    """Choose the kernel for a problem on a processor; pure, so it also plans for absent hardware.

    Args:
        problem: what is to be solved.
        arch: from `detect()` or `kernels.arch.CATALOGUE`.
        registry: rows, most preferred first.

    Returns:
        The chosen row, why, and what the rows before it refused.

    Raises:
        NoKernelError: every row refuses.
    """
    return _plan.select(problem, arch, registry)


@functools.lru_cache(maxsize=256)
def _select_once(problem: AttentionProblem, arch: GPUArch) -> Selection:
    """Choose once per problem, and say so once: a GPU's fallback is a warning with its reasons."""
    selection = select(problem, arch)
    level = logging.INFO if arch.is_cpu or not selection.spec.cpu else logging.WARNING
    refused = " | ".join(str(refusal) for refusal in selection.refusals) or "none"
    _logger.log(level, "attention kernel: %s; rows refused: %s", selection.why, refused)
    return selection


@functools.cache
def _factory(target: str) -> AttentionKernelFactory:
    """Import a row's kernel when it is first used."""
    module, _, attribute = target.partition(":")
    return cast("AttentionKernelFactory", getattr(importlib.import_module(module), attribute))


def plan_attention(
    problem: AttentionProblem,
    batch: PagedBatch,
    arch: GPUArch | None = None,
    selection: Selection | None = None,
) -> AttentionPlan:
    """Choose the kernel and do the work that all layers of a step share.

    Args:
        problem: what stays the same from step to step.
        batch: this step's sequences; its tensors must not change while the plan is in use.
        arch: None asks the batch's device.
        selection: None chooses by the registry; else what `select` returned, as a test does to force
            a row.

    Returns:
        The plan for `prefill_attention` or `decode_attention`.

    Raises:
        ShapeError: the batch contradicts itself or the problem.
        NoKernelError: no row accepts the problem.
    """
    num_seqs = batch.seq_lens.shape[0]
    for name, tensor, shape in (
        ("cu_seqlens_q", batch.cu_seqlens_q, (num_seqs + 1,)),
        ("seq_lens", batch.seq_lens, (num_seqs,)),
        ("block_table", batch.block_table, (num_seqs, batch.block_table.shape[-1])),
    ):
        if tensor.shape != shape or tensor.dtype is not torch.int32:
            raise ShapeError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}; expected {list(shape)} torch.int32"
            )
    if problem.phase is Phase.DECODE and batch.max_seqlen_q > 1:
        raise ShapeError(f"max_seqlen_q is {batch.max_seqlen_q}; decode takes 1 token per sequence")
    if selection is None:
        selection = _select_once(problem, arch or detect(batch.seq_lens.device))
    decode = problem.phase is Phase.DECODE
    num_tokens = num_seqs if decode else int(batch.cu_seqlens_q[-1])
    return AttentionPlan(
        problem=problem,
        selection=selection,
        run=_factory(selection.spec.target)(problem, batch, selection.launch),
        q_shape=(num_tokens, problem.num_heads, problem.head_dim),
        block_shape=(problem.block_size, problem.num_kv_heads, problem.head_dim),
        dtype=getattr(torch, problem.dtype),
    )


def prefill_attention(q: Tensor, kv: Tensor, plan: AttentionPlan, out: Tensor) -> None:
    """Attend a chunk of tokens per sequence to its paged history and, causally, to itself.

    The chunk's own keys and values are already in the cache. Query i of n sees the cached tokens
    up to seq_len - n + i (aligned to the bottom right), less those that the window excludes.

    Args:
        q: [T, H, D], rows as in the plan's `cu_seqlens_q`; contiguous in D.
        kv: [2, N, S, K, D] contiguous; index 0 is keys, 1 is values.
        plan: from `plan_attention` with `Phase.PREFILL`.
        out: [T, H, D] contiguous, written in full.

    Raises:
        ShapeError: a shape or dtype differs from the plan's.
    """
    _check_attention(q, kv, plan, out, Phase.PREFILL)
    plan.run(q, kv, out)


def decode_attention(q: Tensor, kv: Tensor, plan: AttentionPlan, out: Tensor) -> None:
    """Attend one new token per sequence to its paged history.

    Args:
        q: [B, H, D], contiguous in D.
        kv: [2, N, S, K, D] contiguous; index 0 is keys, 1 is values. The new token's are in it.
        plan: from `plan_attention` with `Phase.DECODE`.
        out: [B, H, D] contiguous, written in full; rows of sequences with no tokens become 0.

    Raises:
        ShapeError: a shape or dtype differs from the plan's.
    """
    _check_attention(q, kv, plan, out, Phase.DECODE)
    plan.run(q, kv, out)


def _check_attention(q: Tensor, kv: Tensor, plan: AttentionPlan, out: Tensor, phase: Phase) -> None:
    """Compare shapes and dtypes with the plan's, in about a microsecond when all is well."""
    if (
        q.shape == plan.q_shape
        and out.shape == plan.q_shape
        and kv.shape[2:] == plan.block_shape
        and q.dtype is plan.dtype
        and kv.dtype is plan.dtype
        and out.dtype is plan.dtype
        and kv.is_contiguous()
        and plan.problem.phase is phase
    ):
        return
    if plan.problem.phase is not phase:
        raise ShapeError(f"the plan is for {plan.problem.phase.value}, this is {phase.value}")
    block = ", ".join(map(str, plan.block_shape))
    raise ShapeError(
        f"q is {_describe(q)}, out is {_describe(out)}, kv is {_describe(kv)}; the plan takes "
        f"q and out {list(plan.q_shape)}, kv contiguous [2, N, {block}], all {plan.dtype}"
    )


def _describe(tensor: Tensor) -> str:
    text = f"{list(tensor.shape)} {tensor.dtype}"
    return text if tensor.is_contiguous() else f"{text} not contiguous"


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Write a step's keys and values to their cache slots.

    Args:
        k: [T, K, D] in the cache's dtype, any strides.
        v: [T, K, D], likewise.
        kv: [2, N, S, K, D] contiguous; index 0 is keys, 1 is values.
        slot_mapping: [T] int32 (int64 is taken too); block id * S + offset in the block, -1 to skip a token; else
            distinct.

    Raises:
        ShapeError: a shape or dtype differs from the above.
    """
    if (
        k.shape != v.shape
        or k.shape[1:] != kv.shape[3:]
        or slot_mapping.shape[0] != k.shape[0]
        or slot_mapping.dtype not in _SLOT_DTYPES
        or k.dtype is not kv.dtype
        or v.dtype is not kv.dtype
        or not kv.is_contiguous()
    ):
        raise ShapeError(
            f"k is {_describe(k)}, v is {_describe(v)}, kv is {_describe(kv)}, slot_mapping is "
            f"{_describe(slot_mapping)}; expected k and v [T, K, D], kv "
            "contiguous [2, N, S, K, D], all of one dtype, slot_mapping [T] int32"
        )
    _write_kv(k, v, kv, slot_mapping)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, sliding_window: int | None = None
) -> Tensor:
    """Causal attention of whole sequences, differentiable: the attention of training.

    Args:
        q: [B, S, H, D], S here the sequence length.
        k: [B, S, K, D]; K divides H.
        v: [B, S, K, D].
        softmax_scale: factor on the scores before the softmax.
        sliding_window: tokens that a query attends to, itself included; None for all.

    Returns:
        [B, S, H, D] in q's dtype.

    Raises:
        ShapeError: the shapes do not fit each other.
    """
    if (
        q.ndim != 4
        or k.shape != v.shape
        or q.shape[:2] != k.shape[:2]
        or q.shape[3] != k.shape[3]
        or q.shape[2] % k.shape[2]
    ):
        raise ShapeError(
            f"q is {_describe(q)}, k is {_describe(k)}, v is {_describe(v)}; expected "
            "q [B, S, H, D], k and v [B, S, K, D], H a multiple of K"
        )
    return _flash_attention(q, k, v, softmax_scale, sliding_window)
