"""Products of one of several ranks that share a model, and the communication between them.

qkv, gate_up    rows of this rank's heads and of its part of the MLP      no communication
output, down    the columns that belong to them                           partial sums, added over all ranks
head            1/N of the vocabulary                                     logits, gathered from all ranks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.linear.around import joined
from kernels.linear.projection import FixedProjection, Residual
from kernels.norms import pytorch
from kernels.sampling.tokens import argmax_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.collective.communicator import Communicator
    from kernels.linear.projection import Norm, Projection
    from kernels.linear.residual import Add
    from model.executors.head import Head


class ReducedProjection:
    """A projection that adds to the residual stream, with the columns of one rank; sums them over all ranks.

    On a GPU the sum is left to the norm that reads the residual stream.

    Args:
        product: of this rank's columns, without bias and norm.
        bias: [C], of the sum; None for none.
        post_norm: of the sum, before it is added to the residual stream; None for none.
        communicator: of the ranks.
    """

    def __init__(
        self,
        product: Projection,
        bias: Tensor | None,
        post_norm: Norm | None,
        communicator: Communicator,
    ) -> None:
        self.copies_weights = product.copies_weights
        self._product, self._bias, self._post_norm = product, bias, post_norm
        self._communicator = communicator
        # Kernels on a GPU add partial sums with the next norm.
        self._leaves_partials = not isinstance(product, FixedProjection)

    def adapted(self, add: Add) -> ReducedProjection:
        """See `ResidualWriter.adapted`; each rank adds a part of the sum."""
        product = self._product.adapted(add)
        return ReducedProjection(product, self._bias, self._post_norm, self._communicator)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """See `Projection.row_counts`."""
        return self._product.row_counts

    def prefetches(self, rows: int, /) -> bool:
        """See `Projection.prefetches`."""
        return self._product.prefetches(rows)

    def to_residual(self, x: Tensor, residual: Residual) -> Residual:
        """See `Projection.to_residual`."""
        hidden = residual.hidden
        assert residual.partials is None, "`from_residual` comes first, and adds them"
        parts = self._product.partials(x)
        if self._leaves_partials and self._bias is None and self._post_norm is None:
            return Residual(hidden, parts, self._communicator)
        total = self._communicator.all_reduce(joined(parts, x.dtype))
        if self._bias is not None:
            total += self._bias
        if self._post_norm is not None:
            total = pytorch.rms_norm(total, self._post_norm.weight, self._post_norm.eps)
        if self._leaves_partials:
            return Residual(hidden, total[None])
        return Residual(hidden + total.to(hidden.dtype))


class GatheredHead:
    """The output head with the rows of one rank; gathers the logits of all ranks.

    Args:
        head: of this rank's rows; see `shard`.
        vocab_size: V.
        communicator: of the ranks.
    """

    def __init__(self, head: Head, vocab_size: int, communicator: Communicator) -> None:
        self.copies_weights = head.copies_weights
        self._head, self._vocab_size, self._communicator = head, vocab_size, communicator

    @property
    def row_counts(self) -> tuple[int, ...]:
        """See `Head.row_counts`."""
        return self._head.row_counts

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Head.__call__`."""
        parts = self._communicator.all_gather(self._head(x))
        *more, rows = parts.shape[1:]
        if out is None:
            out = parts.new_empty(*more, self._vocab_size)
        for rank, part in enumerate(parts):
            start = min(rank * rows, self._vocab_size - rows)
            out[..., start : start + rows] = part
        return out

    def argmax(self, x: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """See `Head.argmax`."""
        return argmax_tokens(self(x, out), checked=tokens, logprobs=logprobs)[0]
