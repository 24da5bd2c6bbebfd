"""The door to the operations that make tokens of logits on a GPU.

Knows logits and tables of numbers, nothing of requests or of text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.arch import detect
from kernels.draw_rows import (
    FILTERED,
    GREEDY,
    UNFILTERED,
    WEIGHT_SCALE,
    DrawRow,
    candidate_bounds,
)
from kernels.fused.dependent import may_depend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "FILTERED",
    "GREEDY",
    "UNFILTERED",
    "WEIGHT_SCALE",
    "DrawRow",
    "candidate_bounds",
    "draw_tokens",
    "has_kernels",
    "most_likely_tokens",
]

_AMPERE = 80


def has_kernels(device: torch.device) -> bool:
    """Whether tokens can be drawn by kernels of ours: from sm_80 on, as for attention."""
    return device.type == "cuda" and detect(device).sm >= _AMPERE


def most_likely_tokens(
    logits: Tensor, tokens: Tensor | None = None, checked: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the most likely token of each row, the smallest id among equals, without waiting for the device.

    Can be recorded in a CUDA graph.

    Args:
        logits: [R, V], R >= 1, float32, bfloat16 or float16, contiguous in V. Not changed.
        tokens: [R] int64 contiguous; None allocates it.
        checked: likewise.

    Returns:
        `tokens`, valid ids whatever the logits, NaN counting as the largest; and `checked`, the same but -1 where
        the largest logit is no finite number.
    """
    if tokens is None:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if checked is None:
        checked = torch.empty_like(tokens)
    if has_kernels(logits.device):
        # Imported here: Triton is not there on a host without a GPU.
        from kernels.fused.most_likely import most_likely_tokens as choose  # noqa: PLC0415

        choose(logits, tokens, checked, pdl=may_depend(detect(logits.device), logits.device))
        return tokens, checked
    largest, most_likely = logits.max(-1)
    tokens.copy_(most_likely)
    # Not a number minus itself, and infinity minus itself, are not 0.
    checked.copy_(torch.where(largest - largest == 0, most_likely, -1))
    return tokens, checked


def draw_tokens(
    logits: Tensor, rows: Sequence[DrawRow], table: Tensor, tokens: Tensor, checked: Tensor
) -> None:
    """Draw a token for each of some rows without waiting for the device, where it `has_kernels`.

    Args:
        logits: [M, V], float32, bfloat16 or float16, contiguous in V. Not changed.
        rows: at least one; their targets are distinct.
        table: [R, fields of `DrawRow`] float64 contiguous: `rows` on the device.
        tokens: [N] int64 contiguous; takes valid ids at the rows' targets, whatever the logits.
        checked: [N] int64 contiguous; the same, but -1 where the largest logit is no finite number.
    """
    # Imported here: Triton is not there on a host without a GPU.
    from kernels.fused.draw_tokens import draw_tokens as draw  # noqa: PLC0415

    kinds = {row.kind for row in rows}
    draw(
        logits, table, kinds, tokens, checked, pdl=may_depend(detect(logits.device), logits.device)
    )
