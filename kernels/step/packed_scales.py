"""The scales of a model's matrices, in the order in which the single launch of a decode step copies them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.step.sizes import PARTS, ROWS, WARPS, part_columns, part_scales
from kernels.step.weights import MATRICES

if TYPE_CHECKING:
    from kernels.step.weights import StepWeights
    from kernels.weights import Weight


MIDDLE: Final = 8
"""Offset of packed shifts."""


def packed_scales(weights: StepWeights) -> list[dict[str, Tensor]]:
    """Return the scales of each layer's matrices by name; nothing for full numbers.

    Those of rows are the weights' own. Those of groups and blocks are copies, see `pack`.
    """
    found = []
    for layer in weights.layers:
        matrices = {name: getattr(layer, name) for name in MATRICES}
        found.append(
            {
                name: pack(it, weights.embedding.dtype) if it.format.group else it.scale
                for name, it in matrices.items()
                if it.scale is not None
            }
        )
    return found


def pack(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Return the scales of weights in groups or blocks as int32, in the order of the stages of 8 rows.

    A number has the bits of a scale in float32. Where there are shifts, its lower half has those of a scale, rounded to
    `dtype`, and its upper half those of the shift for an offset of `MIDDLE`. Behind the end of a row all are 0.

    The dimensions are [N / 8, stages, halves of a stage, 8, groups of a part, parts]; where a group has 32 columns
    [N / 8, stages, halves, 2, 8, warps, parts], since a warp has two groups of a part.

    Args:
        weight: [N, C], N a multiple of 8.
        dtype: float16 or bfloat16.
    """
    form, (outputs, inputs) = weight.format, weight.shape
    each = part_scales(form)
    stages = -(-inputs // (2 * PARTS * part_columns(form)))
    column = torch.arange(stages * 2 * PARTS * each, device=weight.numbers.device)
    column *= part_columns(form) // each
    last = form.scale_shape(weight.shape)[1] - 1
    group = (column // form.group).clamp_(max=last)
    parts = [torch.where(column < inputs, it[:, group].float(), 0) for it in weight.scales.values()]
    if form.scales == "block":
        parts = [it.repeat_interleave(form.group, 0)[:outputs] for it in parts]
    if weight.shift is None:
        packed = parts[0].view(torch.int32)
    else:
        # About the middle of the numbers, a shift is small, and so is its error.
        parts[1] += (MIDDLE - form.offset) * parts[0]
        low, high = (it.to(dtype).view(torch.int16).to(torch.int32) for it in parts)
        packed = (low & 0xFFFF) | (high << 16)
    ordered = packed.view(-1, ROWS, stages, 2, PARTS, each).permute(0, 2, 3, 1, 5, 4)
    if each > WARPS:
        ordered = ordered.reshape(-1, stages, 2, ROWS, WARPS, 2, PARTS).permute(0, 1, 2, 5, 3, 4, 6)
    return ordered.contiguous()
