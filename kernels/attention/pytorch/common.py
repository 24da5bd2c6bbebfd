"""Helpers of the PyTorch kernels: views of runs of cache slots, and attention over dense tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.errors import ShapeError

if TYPE_CHECKING:
    from kernels.attention.problem import AttentionProblem
    from kernels.attention.pytorch.paged_host import Run


def check_blocks(kv: Tensor, needed: int) -> None:
    """Check that a cache contains all blocks that the plan reads.

    Raises:
        ShapeError: the cache has fewer than `needed` blocks.
    """
    if kv.shape[1] < needed:
        raise ShapeError(
            f"the block table names block {needed - 1}; the cache has {kv.shape[1]} blocks"
        )


class RunView(NamedTuple):
    """Size, stride and offset of the view of a layer's cache that contains the keys of one run.

    `read` makes the view with one call, because each view of a chain takes a microsecond.

    Attributes:
        size: (1, K, length, D).
        stride: elements.
        offset: elements from the layer's first key.
    """

    size: tuple[int, int, int, int]
    stride: tuple[int, int, int, int]
    offset: int

    @classmethod
    def of(cls, run: Run, problem: AttentionProblem) -> RunView:
        """Return the view of the slots of `run`."""
        heads, head_dim = problem.num_kv_heads, problem.head_dim
        row = heads * head_dim
        return cls((1, heads, run.length, head_dim), (row, head_dim, row, 1), run.slot * row)

    def read(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, each [1, K, length, D], of kv [2, N, S, K, D] without a copy."""
        keys = kv.storage_offset() + self.offset
        return (
            kv.as_strided(self.size, self.stride, keys),
            kv.as_strided(self.size, self.stride, keys + kv.stride(0)),
        )


def read_views(kv: Tensor, views: tuple[RunView, ...]) -> tuple[Tensor, Tensor]:
    """Return keys and values of all views, each [1, K, n, D]: a view of one run, or a copy of several."""
    if len(views) == 1:
        return views[0].read(kv)
    parts = [view.read(kv) for view in views]
    return torch.cat([part[0] for part in parts], 2), torch.cat([part[1] for part in parts], 2)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: AttentionProblem,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """Compute attention of q [b, h, m, D] over k and v [b, h, n, D].

    Args:
        q: queries.
        k: keys, any strides with D contiguous; none may be NaN.
        v: values, like the keys.
        problem: gives scale and softcap.
        mask: additive, broadcast to [b, h, m, n], 0 or -inf, in q's dtype; no row all -inf.
        is_causal: whether query i sees keys 0 to i only; not with `mask` or a softcap.

    Returns:
        [b, h, m, D] in q's dtype.
    """
    if problem.softcap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=problem.softmax_scale
        )
    assert not is_causal, "a softcap is computed with an explicit mask"
    scores = q.float() @ k.float().transpose(-1, -2)
    scores = torch.tanh(scores * (problem.softmax_scale / problem.softcap)) * problem.softcap
    if mask is not None:
        scores = scores + mask
    return (scores.softmax(-1) @ v.float()).to(q.dtype)
