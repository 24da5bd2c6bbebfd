"""Forward of attention for training by the prefill kernel of Hopper, where it supports the problem."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from kernels.attention.functional import plan_attention, prefill_attention
from kernels.attention.problem import AttentionProblem, PackedBatch, Phase
from kernels.attention.select import select
from kernels.errors import NoKernelError

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.arch import GPUArch
    from kernels.attention.select import Selection
    from kernels.attention.training import TrainingBatch, TrainingProblem

_DTYPES = (torch.bfloat16, torch.float16)
_FEWEST_OPERATIONS = 4e11
"""A millisecond of the GPU: planning a call takes the host about as long."""
_ALIGNMENT = 16
"""Bytes, of addresses and strides of the queries."""


def prefill_selection(
    q: Tensor, k: Tensor, batch: TrainingBatch, problem: TrainingProblem, arch: GPUArch
) -> Selection | None:
    """Return `hopper_prefill` if it computes the forward of a problem, else None.

    It knows neither dropout nor ALiBi nor block masks, and takes positive scales.

    Args:
        q: [T, H, D].
        k: [T_k, K, D].
        batch: the sequences.
        problem: how they attend.
        arch: processor of `q`.
    """
    if (
        q.dtype not in _DTYPES
        or problem.softmax_scale <= 0
        or problem.dropout_p
        or batch.alibi_slopes is not None
        or batch.mask is not None
    ):
        return None
    pairs = len(q) * problem.max_seqlen_k / (2 if problem.causal else 1)
    if 4 * pairs * q.shape[1] * q.shape[2] < _FEWEST_OPERATIONS:
        return None
    selection = _select_once(_as_prefill(q, k, problem), arch)
    return selection if selection and selection.spec.name == "hopper_prefill" else None


def prefill_forward(
    tensors: tuple[Tensor, Tensor, Tensor],
    batch: TrainingBatch,
    problem: TrainingProblem,
    selection: Selection,
) -> tuple[Tensor, Tensor]:
    """Compute attention; see `kernels.attention.training.TrainingKernel.forward`.

    Args:
        tensors: q, k and v.
        batch: the sequences.
        problem: how they attend.
        selection: from `prefill_selection`.
    """
    q, k, v = tensors
    if any(
        it % _ALIGNMENT for it in (q.data_ptr(), *(q.element_size() * n for n in q.stride()[:2]))
    ):
        q = q.clone(memory_format=torch.contiguous_format)
    packed = PackedBatch(
        batch.cu_seqlens_q, batch.cu_seqlens_k, len(q), problem.max_seqlen_q, problem.max_seqlen_k
    )
    plan = plan_attention(_as_prefill(q, k, problem), packed, selection=selection)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    prefill_attention(q, torch.stack((k, v)), plan, out, lse)
    return out, lse


def _as_prefill(q: Tensor, k: Tensor, problem: TrainingProblem) -> AttentionProblem:
    return AttentionProblem(
        phase=Phase.PREFILL,
        dtype=str(q.dtype).removeprefix("torch."),
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        block_size=None,
        softmax_scale=problem.softmax_scale,
        sliding_window=problem.sliding_window,
        softcap=problem.softcap,
        causal=problem.causal,
        lse=True,
    )


@functools.lru_cache(maxsize=256)
def _select_once(problem: AttentionProblem, arch: GPUArch) -> Selection | None:
    try:
        return select(problem, arch)
    except NoKernelError:  # such as a head dim of 16
        return None
