"""States of decode rows in slots: reading and writing them without a look at the numbers of the slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def read_rows(states: Tensor, slots: Tensor) -> Tensor:
    """Return copies of the states of some rows, [R, ...]; zeros where the slot is -1.

    Args:
        states: [S, ...].
        slots: [R].
    """
    absent = (slots < 0).view(-1, *(1,) * (states.dim() - 1))
    return states[slots.clamp(min=0)].masked_fill_(absent, 0.0)


def write_rows(states: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write the states of some rows, except those whose slot is -1.

    Args:
        states: [S, ...].
        slots: [R], no two alike unless -1.
        new: [R, ...].
    """
    if states.device.type == "cpu":
        kept = slots >= 0
        states[slots[kept]] = new[kept]
    else:
        write_all_rows(states, slots, new)


def write_all_rows(states: Tensor, slots: Tensor, new: Tensor) -> None:
    """Do what `write_rows` does by operations whose sizes do not depend on the slots, so that they can be recorded.

    A row whose slot is -1 writes what the first row with a slot writes; slot 0 to itself if there is none.
    """
    every = torch.arange(len(slots), device=slots.device)
    row = every.where(slots >= 0, (slots >= 0).int().argmax())
    target = slots[row]
    nothing = (target < 0).view(-1, *(1,) * (states.dim() - 1))
    states[target.clamp(min=0)] = states[:1].where(nothing, new[row])
