"""The plan of a step's attention: a kernel bound to the step's batch, with the shapes that it accepts."""

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

        A decode on a GPU also accepts a float32 `out` for a problem of another dtype, which a cascade merges.
        """


class AttentionKernelFactory(Protocol):
    """Binds a kernel to the batch of one step; `KernelSpec.target` names one."""

    def __call__(
        self, problem: AttentionProblem, batch: PagedBatch | PackedBatch, selection: Selection
    ) -> AttentionKernel:
        """Do the work that all layers of a step share."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A kernel bound to one step's batch; every layer of the step reuses it.

    Attributes:
        problem: the problem that it solves.
        selection: the chosen row and the reason for it.
        run: the bound kernel.
        q_shape: (T, H, D), the shape of queries and output.
        kv_shape: (S, K, D), the shape of a cache block; (K, D) for packed keys and values.
        dtype: dtype of queries and output.
        kv_dtype: dtype of the cache.
        device: device of all tensors.
        prefix: the row that computes attention to the shared prefix, if the plan reads it once.

    Example:
        >>> problem = AttentionProblem(
        ...     Phase.DECODE, "float32", num_heads=8, num_kv_heads=2, head_dim=32, block_size=16,
        ...     softmax_scale=32**-0.5,
        ... )
        >>> batch = PagedBatch(
        ...     cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        ...     seq_lens=torch.tensor([20], dtype=torch.int32),
        ...     block_table=torch.tensor([[3, 0]], dtype=torch.int32),
        ...     num_tokens=1, max_seqlen_q=1, max_seqlen_k=20,
        ... )
        >>> plan = plan_attention(problem, batch)
        >>> isinstance(plan, AttentionPlan), plan.selection.spec.phase
        (True, <Phase.DECODE: 'decode'>)
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
