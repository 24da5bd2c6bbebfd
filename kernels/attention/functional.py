"""The public operations of attention over a cache: plan a step, attend, write the cache.

Dimensions: B sequences, T tokens of the step, H query heads, K key-value heads, D head dim, N blocks, S block size.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.arch import GPUArch, detect
from kernels.attention.cascade import prefix_problem, prefix_selection, rest_of
from kernels.attention.checks import (
    check_attention,
    check_batch,
    check_lse,
    check_scale,
    check_write,
)
from kernels.attention.plan import AttentionKernel, AttentionKernelFactory, AttentionPlan
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.attention.pytorch.write_kv import write_kv as _write_kv
from kernels.attention.select import Selection, select_for, select_for_queries
from kernels.selection import load

if TYPE_CHECKING:
    from kernels.attention.portable.cascade_decode import PrefixKernel

_logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def _select_once(problem: AttentionProblem, arch: GPUArch) -> Selection:
    """Select the kernel once per problem and log the choice: as a warning if a GPU falls back to PyTorch."""
    selection = select_for_queries(problem, arch)
    level = logging.DEBUG if arch.is_cpu or not selection.spec.cpu else logging.WARNING
    passed = " | ".join(str(refusal) for refusal in selection.refusals) or "none"
    _logger.log(level, "attention kernel: %s; unsupported rows: %s", selection.why, passed)
    return selection


def plan_attention(
    problem: AttentionProblem,
    batch: PagedBatch | PackedBatch,
    arch: GPUArch | None = None,
    selection: Selection | None = None,
) -> AttentionPlan:
    """Choose the kernel and do the work that all layers of a step share.

    Args:
        problem: the properties that are constant from step to step.
        batch: this step's sequences; its tensors must not change while the plan is in use. If the plan
            is made inside a captured CUDA graph, they may change between replays, within the bounds that
            the batch gives. A plan made before the capture must live as long as the graph.
        arch: the processor; None detects that of the batch's device.
        selection: the row to use, from `select`; None chooses one.

    Returns:
        The plan for `prefill_attention` or `decode_attention`, whichever its problem's phase says: a decode of
        several query tokens per sequence that no decode row supports is planned as a prefill. Its calls share memory:
        on a GPU, make them on one stream.

    Raises:
        ShapeError: the batch is inconsistent or does not fit the problem.
        NoKernelError: no row supports the problem.

    Example:
        >>> problem = AttentionProblem(
        ...     Phase.DECODE, "float32", num_heads=8, num_kv_heads=2, head_dim=32, block_size=16, softmax_scale=32**-0.5
        ... )
        >>> batch = PagedBatch(
        ...     cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        ...     seq_lens=torch.tensor([20, 5], dtype=torch.int32),
        ...     block_table=torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        ...     num_tokens=2, max_seqlen_q=1, max_seqlen_k=20,
        ... )
        >>> plan = plan_attention(problem, batch)
        >>> plan.q_shape, plan.kv_shape
        ((2, 8, 32), (16, 2, 32))
    """
    check_batch(problem, batch)
    if selection is None:
        selection = _select_once(problem, arch or detect(batch.cu_seqlens_q.device))
        if selection.spec.phase is not problem.phase:
            problem = dataclasses.replace(problem, phase=selection.spec.phase)
        selection = select_for(selection, problem, batch)
    heads = (problem.num_kv_heads, problem.head_dim)
    run, prefix = _bind(problem, batch, selection)
    return AttentionPlan(
        problem=problem,
        selection=selection,
        run=run,
        q_shape=(batch.num_tokens, problem.num_heads, problem.head_dim),
        kv_shape=heads if problem.block_size is None else (problem.block_size, *heads),
        dtype=getattr(torch, problem.dtype),
        kv_dtype=getattr(torch, problem.cache_dtype),
        device=batch.cu_seqlens_q.device,
        prefix=prefix,
    )


def _bind(
    problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
) -> tuple[AttentionKernel, Selection | None]:
    """Bind the kernel to a step's batch: as a cascade if the sequences share a prefix and a row supports it."""
    make: AttentionKernelFactory = load(selection.spec.target)
    if (
        not isinstance(batch, PagedBatch)
        or not batch.shared_prefix
        or not selection.spec.lse
        or not batch.num_seqs
        or not (prefix := prefix_selection(problem, selection.arch))
    ):
        return make(problem, batch, selection), None
    assert problem.block_size is not None, (
        "check_batch raises for a paged batch without a block size"
    )
    # Imported here because a host without a GPU may have no Triton.
    from kernels.attention.portable.cascade_decode import CascadeDecode  # noqa: PLC0415

    shared: PrefixKernel = load(prefix.spec.target)(prefix_problem(problem), batch, prefix)
    rest_problem = dataclasses.replace(problem, lse=True)
    rest = make(rest_problem, rest_of(batch, problem.block_size), selection)
    return CascadeDecode(problem, batch, shared, rest), prefix


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    kv_scale: Tensor | None = None,
) -> None:
    """Compute attention of a chunk of tokens per sequence to its history and, causally, to itself.

    The chunk's own keys and values are already in the cache. Query i of n sees the cached tokens
    up to seq_len - n + i (aligned to the bottom right), except those outside the window.

    Args:
        q: [T, H, D], rows as in the plan's `cu_seqlens_q`; contiguous in D. On a GPU the heads of a
            token lie within 2^31 elements.
        kv: index 0 is keys, 1 is values. Paged: [2, N, S, K, D] contiguous. Packed, if the problem
            has no block size: [2, T_k, K, D], contiguous in D, rows as in the plan's `cu_seqlens_k`.
        plan: from `plan_attention` with `Phase.PREFILL`.
        out: [T, H, D] contiguous; every row of a sequence is written. Rows that attend to nothing become 0.
        lse: [T, H] float32 contiguous; the natural logarithm of the sum of exponentials of the
            scaled scores, -inf for rows that attend to nothing. Given if and only if the problem has `lse`.
        kv_scale: [2, N, K, S] float32 contiguous; the factor of each key and each value of a head. Given if and only if
            the cache is quantized. Slots without a token may hold any value, in `kv` too.

    Raises:
        ShapeError: a shape, stride or dtype differs from the plan's, or the chosen kernel cannot address a tensor:
            `hopper_prefill` needs addresses and strides of q, kv and out that are multiples of 16 bytes.

    Example:
        >>> problem = AttentionProblem(
        ...     Phase.PREFILL, "float32", num_heads=8, num_kv_heads=2, head_dim=32, block_size=16,
        ...     softmax_scale=32**-0.5,
        ... )
        >>> batch = PagedBatch(  # prompts of 20 and 5 tokens
        ...     cu_seqlens_q=torch.tensor([0, 20, 25], dtype=torch.int32),
        ...     seq_lens=torch.tensor([20, 5], dtype=torch.int32),
        ...     block_table=torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        ...     num_tokens=25, max_seqlen_q=20, max_seqlen_k=20,
        ... )
        >>> q, kv = torch.randn(25, 8, 32), torch.randn(2, 4, 16, 2, 32)  # a cache of 4 blocks
        >>> out = torch.empty_like(q)
        >>> prefill_attention(q, kv, plan_attention(problem, batch), out)
        >>> bool(out.isfinite().all())
        True
    """
    check_attention(q, kv, plan, out, Phase.PREFILL)
    _run(q, kv, plan, out, lse, kv_scale)


def decode_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    lse: Tensor | None = None,
    *,
    kv_scale: Tensor | None = None,
) -> None:
    """Compute attention of one new token per sequence, or a few, to its paged history.

    Args:
        q: [T, H, D] as in `prefill_attention`; T is B unless the problem allows more queries per sequence.
        kv: [2, N, S, K, D] contiguous; index 0 is keys, 1 is values. It includes the new tokens.
        plan: from `plan_attention` with `Phase.DECODE`.
        out: [T, H, D] contiguous; every row of a sequence is written. Rows of empty sequences become 0.
        lse: as in `prefill_attention`.
        kv_scale: as in `prefill_attention`.

    Raises:
        ShapeError: a shape, stride or dtype differs from the plan's.

    Example:
        >>> problem = AttentionProblem(
        ...     Phase.DECODE, "float32", num_heads=8, num_kv_heads=2, head_dim=32, block_size=16, softmax_scale=32**-0.5
        ... )
        >>> batch = PagedBatch(
        ...     cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        ...     seq_lens=torch.tensor([20], dtype=torch.int32),
        ...     block_table=torch.tensor([[3, 0]], dtype=torch.int32),
        ...     num_tokens=1, max_seqlen_q=1, max_seqlen_k=20,
        ... )
        >>> q, kv = torch.randn(1, 8, 32), torch.randn(2, 4, 16, 2, 32)  # a cache of 4 blocks
        >>> out = torch.empty_like(q)
        >>> decode_attention(q, kv, plan_attention(problem, batch), out)
        >>> bool(out.isfinite().all())
        True
    """
    check_attention(q, kv, plan, out, Phase.DECODE)
    _run(q, kv, plan, out, lse, kv_scale)


def _run(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    out: Tensor,
    lse: Tensor | None,
    kv_scale: Tensor | None,
) -> None:
    """Run the plan's kernel. Only kernels that read a quantized cache have the parameter `kv_scale`."""
    check_lse(lse, plan)
    check_scale(kv, plan, kv_scale)
    if kv_scale is None:
        plan.run(q, kv, out, lse)
    else:
        plan.run(q, kv, out, lse, kv_scale=kv_scale)


def write_kv(
    k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor, *, kv_scale: Tensor | None = None
) -> None:
    """Write a step's keys and values to their cache slots.

    Args:
        k: [T, K, D] contiguous in D, in the cache's dtype unless that is float8_e4m3fn.
        v: [T, K, D], as `k`.
        kv: [2, N, S, K, D] contiguous; index 0 is keys, 1 is values. In float8_e4m3fn each key and
            each value of a head is divided by its scale and rounded to the nearest, ties to even.
        slot_mapping: [T] int32 or int64, contiguous; block id * S + offset in the block, distinct, or
            -1 to skip a token.
        kv_scale: [2, N, K, S] float32 contiguous; the scales are written to it: the largest magnitude of the key or
            value divided by 448, 1 for zeros. Given if and only if the cache is in float8_e4m3fn.

    Raises:
        ShapeError: a shape or dtype differs from the above.

    Example:
        >>> k, v = torch.randn(2, 3, 2, 32)
        >>> kv = torch.zeros(2, 4, 16, 2, 32)  # a cache of 4 blocks of 16 tokens
        >>> write_kv(k, v, kv, torch.tensor([16, 17, 18]))  # the first tokens of block 1
        >>> torch.equal(kv[0, 1, :3], k)
        True
    """
    check_write(k, v, kv, slot_mapping, kv_scale)
    if kv.is_cuda and detect(kv.device).has_triton:
        # Imported here because a host without a GPU may have no Triton.
        from kernels.attention.portable.write_kv import write_kv as scatter  # noqa: PLC0415

        scatter(k, v, kv, slot_mapping, kv_scale)
    else:
        _write_kv(k, v, kv, slot_mapping, kv_scale)
