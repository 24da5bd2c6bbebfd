"""The output head: the projection to the vocabulary, with a softcap of the logits where the family has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from kernels.sampling.tokens import argmax_tokens

if TYPE_CHECKING:
    from torch import Tensor


class Head(Protocol):
    """Computes logits; its methods are those of `kernels.linear.projection.Projection`.

    Attributes:
        copies_weights: as in `Projection`.
    """

    copies_weights: bool

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows for which its products are compiled."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the logits of x, [T, C]; returns [T, V], which is `out` if given."""

    def argmax(self, x: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Compute the logits of x and the argmax of each row."""


class SoftcappedHead:
    """Computes c * tanh(logit / c) of another head's logits.

    Args:
        head: the projection.
        softcap: c.
    """

    def __init__(self, head: Head, softcap: float) -> None:
        self.copies_weights = head.copies_weights
        self._head, self._softcap = head, softcap

    @property
    def row_counts(self) -> tuple[int, ...]:
        """See `Head.row_counts`."""
        return self._head.row_counts

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See `Head.__call__`."""
        capped = torch.tanh(self._head(x, out) / self._softcap) * self._softcap
        return capped if out is None else out.copy_(capped)

    def argmax(self, x: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """See `Head.argmax`."""
        return argmax_tokens(self(x, out), checked=tokens, logprobs=logprobs)[0]
