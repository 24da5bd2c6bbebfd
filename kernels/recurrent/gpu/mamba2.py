"""Mamba-2 in Triton: two launches for decode rows, also with drafts, and four or five for prompts, however many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.recurrent.gpu.mamba2_prompt import mamba2_prompts
from kernels.recurrent.gpu.mamba2_step import Step
from kernels.recurrent.pytorch import mamba2 as pytorch

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import Mamba2Shape, RecurrentWeights
    from kernels.recurrent.segments import Segments


class Mamba2(pytorch.Mamba2):
    """See `RecurrentKernel`: a token's bits depend on its sequence alone. PyTorch computes whole sequences."""

    def __init__(self, shape: Mamba2Shape, weights: RecurrentWeights) -> None:
        super().__init__(shape, weights)
        self._step = Step(shape, weights)

    def __call__(
        self,
        projected: Tensor,
        _gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """Compute the tokens of a step, [T, inner]; see `RecurrentKernel`."""
        tokens, rows = len(projected), segments.rows
        out = torch.empty(
            (tokens, self.shape.inner), dtype=projected.dtype, device=projected.device
        )
        if segments.by_token:
            self._step(projected, states, segments, out)
            return out
        if rows:
            self._step(projected, states, segments, out[:rows])
        mamba2_prompts(self.shape, self.weights, projected, states, segments, out[rows:])
        return out
