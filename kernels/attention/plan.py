"""What a step's attention is planned as: a kernel bound to the step's batch, with the shapes it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch
    from kernels.attention.select import Selection


class AttentionKernel(Protocol):
    """A kernel bound to the batch of one step; called once per layer."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of `q` over `kv` to `out`; shapes as in `kernels.attention.functional`.

        A decode on a GPU also takes a float32 `out` for a problem of another dtype: a cascade merges it.
        """


class AttentionKernelFactory(Protocol):
    """What `KernelSpec.target` names: binds a kernel to the batch of one step."""

    def __call__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> AttentionKernel:
        """Do the work that all layers of a step share."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A kernel bound to one step's batch; every layer of the step reuses it.

    Attributes:
        problem: what it solves.
        selection: the chosen row, and why.
        run: the bound kernel.
        q_shape: (T, H, D) that queries and output must have.
        kv_shape: (S, K, D) that the cache's blocks must have; (K, D) of packed keys and values.
        dtype: of queries and output.
        kv_dtype: of the cache.
        device: of all tensors.
        prefix: the row that attends to the shared tokens, if the plan reads them once.
    """

    problem: AttentionProblem
    selection: Selection
    run: AttentionKernel
    q_shape: tuple[int, int, int]
    kv_shape: tuple[int, ...]
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    prefix: Selection | None = None
