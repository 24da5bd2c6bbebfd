"""The order of the inputs of matrices whose groups are not of inputs beside each other (act-order)."""

from __future__ import annotations

import torch
from torch import Tensor


def order_of_groups(groups: Tensor, group: int) -> Tensor | None:
    """Return the order that sorts inputs by group.

    Args:
        groups: [C], any integers: the group of each input; -1 where none is stated.
        group: inputs of a group, but for the last one.

    Returns:
        [C] int32, for each place the input there; None if they are in their own order.

    Raises:
        ValueError: they are no such groups; the text is the end of a sentence.
    """
    own = torch.arange(len(groups))
    expected = own // group
    if bool((groups == -1).all()) or torch.equal(groups, expected):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), expected):
        raise ValueError(f"whose inputs are in groups that have not {group} inputs each")
    return order.int()
