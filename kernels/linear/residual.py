"""The residual stream of a step, and what linear layers that read it or add to it have in common.

from_residual    y = activation(norm(residual) W^T * scale + bias)
to_residual      residual + norm(x W^T * scale + bias), with or without that norm
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.linear.around import add_and_normalize

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.collective.communicator import Communicator


class Add(Protocol):
    """What a linear layer has besides its weights, added to its product."""

    def __call__(self, x: Tensor, *, pdl: bool = False) -> Callable[[Tensor], Tensor]:
        """Begin with the input of the product, [T, C].

        Returns:
            A function that adds to its argument, [T, N], in place, and returns it.
        """


class Residual(NamedTuple):
    """The residual stream of a step.

    Attributes:
        hidden: [..., C]; updated in place on a GPU, and on a CPU by some products.
        partials: [S, T, C] contiguous, partial sums that are not yet added to `hidden`, float32 or, with `ranks`, its
            dtype; None for none.
        ranks: have partial sums too, all of which are to be added; None if `partials` are all. Only on a GPU.
    """

    hidden: Tensor
    partials: Tensor | None = None
    ranks: Communicator | None = None


class ResidualWriter(Protocol):
    """A linear layer that adds to the residual stream.

    Attributes:
        copies_weights: whether it holds a copy of its weights, so that the caller may free them.
    """

    copies_weights: bool

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows for which its products are compiled."""

    def to_residual(self, x: Tensor, residual: Residual) -> Residual:
        """Project x, [T, C], and add the result to the residual stream, which must have no partial sums."""

    def prefetches(self, rows: int, /) -> bool:
        """Whether the product for `rows` rows loads its weights before it waits for its input."""

    def adapted(self, add: Add) -> ResidualWriter:
        """Return the same linear layer with adapters.

        Args:
            add: what the adapters make of the input of the product; it begins before the product.
        """


class Projection(ResidualWriter, Protocol):
    """A linear layer bound to its weights; see `bind_projection`."""

    def adapted(self, add: Add) -> Projection:
        """See `ResidualWriter.adapted`."""

    def from_residual(self, residual: Residual) -> tuple[Tensor, Residual]:
        """Project the residual stream, normalized if there is a norm.

        Args:
            residual: of T tokens.

        Returns:
            [T, N], and the residual stream with its partial sums added.
        """

    def partials(self, x: Tensor) -> Tensor:
        """Project x, [T, C], for the residual stream but do not add it.

        Returns:
            The result, [1, T, N] in the dtype of x; or its partial sums, [S, T, N] float32, if the projection was
            bound with `Operations.residual`.
        """

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Project x, [T, C], without norm, activation and residual; returns [T, N], which is `out` if given."""

    def argmax(self, x: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Project x and compute the argmax of each row of outputs.

        Args:
            x: [T, C], contiguous in C.
            out: [T, N] contiguous; written.
            tokens: [T] int64 contiguous; written, the index of the largest output, the smallest among equals, or -1
                where the largest output is not finite.
            logprobs: [T] float32 contiguous; written, the log-softmax of that output, arbitrary where `tokens` is -1.

        Returns:
            [T] int64, a new tensor: `tokens` with valid indices instead of -1.
        """


def add_both(
    first: tuple[ResidualWriter, Tensor], second: tuple[ResidualWriter, Tensor], residual: Residual
) -> Residual:
    """Add the results of two linear layers that do not read each other's.

    Args:
        first: a linear layer and its input.
        second: the same.
        residual: the stream, without partial sums.
    """
    one = first[0].to_residual(first[1], residual)
    two = second[0].to_residual(second[1], Residual(one.hidden))
    if one.partials is None:
        return two
    if two.partials is None:
        return Residual(two.hidden, one.partials, one.ranks)
    if one.ranks is two.ranks and one.partials.dtype is two.partials.dtype:
        return Residual(two.hidden, torch.cat((one.partials, two.partials)), one.ranks)
    hidden = settled(Residual(two.hidden, one.partials, one.ranks))
    return Residual(hidden, two.partials, two.ranks)


def settled(residual: Residual) -> Tensor:
    """Return the residual stream with its partial sums added, in place."""
    if residual.partials is None:
        return residual.hidden
    return add_and_normalize(None, *residual, pdl=False)
