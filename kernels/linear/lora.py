"""What low-rank adapters add to the outputs of linear layers: to each row what its adapter adds, or nothing.

    y[t, part p] += (x[t] A[slot of t, p]^T) B[slot of t]            the scale is part of B

A matrix may stack parts, such as q, k and v, with an A each; one B has the columns of all parts. Adapters have slots in
tensors of a fixed size, so that a launch or a recording holds for every mix of adapters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from kernels.selection import load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class LoraWeights(NamedTuple):
    """The matrices of all slots for one linear layer.

    Attributes:
        a: [slots, P, R, C] contiguous; rows beyond an adapter's rank are 0.
        b: [slots, R, N] contiguous, multiplied by the scale; likewise.
        parts: outputs of each of the P parts; N is their sum.
    """

    a: Tensor
    b: Tensor
    parts: tuple[int, ...]

    @classmethod
    def zeros(
        cls,
        slots: int,
        rank: int,
        parts: tuple[int, ...],
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraWeights:
        """Return those of slots without adapters."""
        a = torch.zeros((slots, len(parts), rank, inputs), dtype=dtype, device=device)
        b = torch.zeros((slots, rank, sum(parts)), dtype=dtype, device=device)
        return cls(a, b, parts)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first output of each part, and the one after its last."""
        ends = [0]
        for count in self.parts:
            ends.append(ends[-1] + count)
        return list(pairwise(ends))


class LoraRows(NamedTuple):
    """The adapters of the rows of a step.

    Attributes:
        slots: [T] int32, -1 for none.
        order: [T] int64, the rows sorted by slot; only on a GPU, else None.
        sequences: (first row, row after the last, slot) of each sequence with an adapter; only on a CPU.
        tiles: [3, T] int32 contiguous: the first place in `order`, the place after the last, and the slot, -1 for none,
            of each group of rows that a program computes; only of few rows on a GPU, else None.
    """

    slots: Tensor
    order: Tensor | None = None
    sequences: Sequence[tuple[int, int, int]] = ()
    tiles: Tensor | None = None


class StepLora:
    """The adapters of the step that is computed, for layers that are bound before it.

    Attributes:
        rows: of the step.
    """

    def __init__(self) -> None:
        self.rows: LoraRows | None = None


class LoraLinear:
    """Adds the adapters' results of one linear layer.

    Args:
        weights: of its slots; written when an adapter moves into a slot.
        step: has the rows of the step that is computed.
        first: index of this layer's first output in the product; not 0 if the product has the outputs of others too.
    """

    def __init__(self, weights: LoraWeights, step: StepLora, first: int = 0) -> None:
        self._weights, self._step, self._first = weights, step, first
        self._begin: Callable[..., Callable[[Tensor], Tensor]] = load(_target(weights))

    def __call__(self, x: Tensor, *, pdl: bool = False) -> Callable[[Tensor], Tensor]:
        """Begin with the input of the product, so that a GPU computes both at the same time.

        Args:
            x: [T, C].
            pdl: use programmatic dependent launch.

        Returns:
            A function that adds to its argument, [T, N] or more outputs, in place what the adapters make of x, and
            returns it.
        """
        rows = self._step.rows
        assert rows is not None, "a step with adapters names them"
        finish = self._begin(x, self._weights, rows, pdl=pdl)
        if not self._first:
            return finish

        def add(y: Tensor) -> Tensor:
            finish(y[:, self._first :])
            return y

        return add


def _target(weights: LoraWeights) -> str:
    """Return the function that begins what adapters add to a product."""
    if weights.a.device.type != "cpu":
        return "kernels.linear.gpu.lora:begin_lora"
    computes: Callable[[LoraWeights], bool] = load("kernels.linear.cpu.lora:computes")
    return f"kernels.linear.{'cpu.' if computes(weights) else ''}lora:begin_lora"


def begin_lora(
    x: Tensor,
    weights: LoraWeights,
    rows: LoraRows,
    *,
    pdl: bool = False,  # noqa: ARG001 - only kernels start early
) -> Callable[[Tensor], Tensor]:
    """Return a function that calls `add_lora` for its argument."""
    return lambda y: add_lora(x, y, weights, rows)


def add_lora(x: Tensor, y: Tensor, weights: LoraWeights, rows: LoraRows) -> Tensor:
    """Add to y in PyTorch, sequence by sequence, so that the bits of a row depend on no other sequence.

    The rows of a sequence are copied, because a library may add up numbers at another address in another order.

    Args:
        x: [T, C].
        y: [T, N], written.
        weights: in any float dtype, in which the sums are computed too.
        rows: of the step.
    """
    a, b, _ = weights
    for first, stop, slot in rows.sequences:
        own = x[first:stop].to(a.dtype, copy=True)
        narrowed = functional.linear(own, a[slot].flatten(0, 1)).view(-1, *a.shape[1:3])
        for part, (start, end) in enumerate(weights.bounds):
            wide = torch.mm(narrowed[:, part], b[slot, :, start:end])
            y[first:stop, start:end] += wide.to(y.dtype)
    return y
