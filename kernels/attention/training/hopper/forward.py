"""Attention for training on Hopper: the forward by the prefill kernel, the backward by the portable kernels."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.arch import GPUArch, detect
from kernels.attention.functional import plan_attention, prefill_attention
from kernels.attention.problem import AttentionProblem, PackedBatch
from kernels.attention.select import Selection, select
from kernels.attention.training.portable.launch import PORTABLE

if TYPE_CHECKING:
    from kernels.attention.training.registry import Grads, Saved, TrainingBatch, TrainingProblem

_ALIGNMENT = 16
"""Bytes, of addresses and strides."""


class HopperTraining:
    """See `kernels.attention.training.registry.TrainingKernel`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor]:
        """See `TrainingKernel.forward`."""
        q = aligned(q)
        prefill = problem.as_prefill(q, k)
        plan = plan_attention(
            prefill,
            PackedBatch(
                batch.cu_seqlens_q,
                batch.cu_seqlens_k,
                len(q),
                problem.max_seqlen_q,
                problem.max_seqlen_k,
            ),
            selection=_select_once(prefill, detect(q.device)),
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        prefill_attention(q, torch.stack((k, v)), plan, out, lse)
        return out, lse

    def backward(
        self, grads: Grads, saved: Saved, batch: TrainingBatch, problem: TrainingProblem
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `TrainingKernel.backward`."""
        return PORTABLE.backward(grads, saved, batch, problem)


HOPPER: Final = HopperTraining()


def aligned(x: Tensor) -> Tensor:
    """Return x, [T, H, D] contiguous in D, or a copy if TMA cannot address it."""
    strides = [x.element_size() * stride for stride in x.stride()[:2]]
    can_be_addressed = all(strides) and not any(it % _ALIGNMENT for it in (x.data_ptr(), *strides))
    return x if can_be_addressed else x.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=256)
def _select_once(problem: AttentionProblem, arch: GPUArch) -> Selection:
    return select(problem, arch)
