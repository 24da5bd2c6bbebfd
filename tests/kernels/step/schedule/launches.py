"""Launches of single-launch steps without weights, for `tests.kernels.step.schedule.recorder`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import numpy as np
import torch

from kernels.step.gpu import kernel, kernel_rows
from kernels.step.single_launch import LayerWeights, StepShape, StepWeights, bind_step, unsupported
from kernels.weight_format import unquantized
from kernels.weights import Weight
from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.kernels.step.schedule.recorder import RecordedStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernels.arch import GPUArch
    from kernels.weight_format import WeightFormat
    from tests.kernels.step.schedule.events import Record

_META: Final = torch.device("meta")


@dataclasses.dataclass(frozen=True)
class Launch:
    """A decode step of some rows of a model on a GPU.

    Attributes:
        shape: sizes of the model.
        positions: of each row.
        windows: tokens that each layer attends; None if all.
        earlier: as in `RowsKernel`, of each row; none if empty.
        num_sms: of the GPU, which is like an H100 for the rest.
        form: of the layers' matrices; None for bfloat16.
        fp8_cache: whether the cache is in FP8.
        norms: whether queries and keys are normalized.
        bias: whether the QKV projection has one.
        base: the half that the step begins with.
        early: whether programs arrive early; None as the kernel decides.
    """

    shape: StepShape
    positions: tuple[int, ...] = (100,)
    windows: tuple[int | None, ...] = (None, None)
    earlier: tuple[int, ...] = ()
    num_sms: int = 132
    form: WeightFormat | None = None
    fp8_cache: bool = False
    norms: bool = True
    bias: bool = False
    base: int = 0
    early: bool | None = None
    block_size: int = 16

    @property
    def rows(self) -> int:
        """Rows of the step."""
        return len(self.positions)

    @property
    def arch(self) -> GPUArch:
        """The GPU."""
        return dataclasses.replace(ARCHES[90], num_sms=self.num_sms)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Why there is no such launch; empty if there is."""
        return unsupported(self.shape, torch.bfloat16, self.arch, self.rows, self.form)

    def record(self, replaced: Mapping[Any, Any] | None = None) -> Record:
        """Record the launch; `replaced` are functions of the kernel, and those in their place."""
        weights, caches, scales = self._weights()
        earlier = np.array(self.earlier or (0,) * self.rows)
        sequences = np.cumsum(earlier == 0) - 1
        columns = max(self.positions) // self.block_size + 1
        tables = torch.arange(columns)[None, :] + torch.from_numpy(sequences)[:, None] * columns
        positions = torch.tensor(self.positions)
        slots = tables.gather(1, positions[:, None] // self.block_size)[:, 0] * self.block_size
        slots = (slots + positions % self.block_size).int()
        step = [
            RecordedStep(
                function,
                weights,
                caches,
                scales,
                self.base,
                sequences,
                columns,
                dict(replaced or {}),
            )
            for function in (kernel.whole_step, kernel_rows.step_of_rows)
        ]
        little = {None: kernel._LITTLE_HIDDEN, True: 1 << 30, False: 0}[self.early]
        with (
            mock.patch.object(kernel, "whole_step", step[0]),
            mock.patch.object(kernel_rows, "step_of_rows", step[1]),
            mock.patch.object(kernel, "_LITTLE_HIDDEN", little),
        ):
            bound = bind_step(weights, caches, scales, self.arch, self.rows)
            rope = torch.empty(max(self.positions) + 1, 1, self.shape.head_dim, device=_META)
            as_rows = isinstance(bound, kernel_rows.RowsKernel)
            ids = torch.arange(self.rows)
            # The last row continues from the token sampled by the step before.
            ids[-1] = -1
            vocab = torch.empty(
                self.rows, self.shape.vocab_size, dtype=torch.bfloat16, device=_META
            )
            bound(
                ids, positions, *((torch.from_numpy(earlier).int(),) if as_rows else ()), slots,
                tables.int().contiguous(), (rope,) * (4 if self.shape.local_rope else 2), vocab,
                torch.empty(self.rows, dtype=torch.int64, device=_META), torch.empty(self.rows, device=_META),
                torch.zeros(16, dtype=torch.int64), *((torch.arange(self.rows),) if as_rows else ()),
            )  # fmt: skip
        return step[as_rows].record

    def _weights(self) -> tuple[StepWeights, tuple[Any, ...], tuple[Any, ...]]:
        s = self.shape
        form = self.form or unquantized(torch.bfloat16)
        queries, keys = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim

        def vector(size: int) -> torch.Tensor:
            dtype = torch.float32 if s.float32_norms else torch.bfloat16
            return torch.empty(size, dtype=dtype, device=_META)

        def matrix(outputs: int, inputs: int) -> Weight:
            return Weight.empty(form, (outputs, inputs), _META)

        head_norm = vector(s.head_dim) if self.norms else None
        post_norm = vector(s.hidden_size) if s.post_norms else None
        bias = torch.empty(queries + 2 * keys, dtype=torch.bfloat16, device=_META)
        layer = LayerWeights(
            matrix(queries + 2 * keys, s.hidden_size), matrix(s.hidden_size, queries),
            matrix(2 * s.inner_size, s.hidden_size), matrix(s.hidden_size, s.inner_size),
            vector(s.hidden_size), vector(s.hidden_size), head_norm, head_norm, bias if self.bias else None,
            output_norm=post_norm, down_norm=post_norm,
        )  # fmt: skip
        layers = [layer._replace(window=window) for window in self.windows]
        table = torch.empty(s.vocab_size, s.hidden_size, dtype=torch.bfloat16, device=_META)
        blocks = self.rows * (max(self.positions) // self.block_size + 1)
        sizes = (2, blocks, self.block_size, s.num_kv_heads, s.head_dim)
        dtype = torch.float8_e4m3fn if self.fp8_cache else torch.bfloat16
        cache = torch.empty(sizes, dtype=dtype, device=_META)
        scale = torch.empty(2, blocks, s.num_kv_heads, self.block_size, device=_META)
        weights = StepWeights(s, layers, table, table, vector(s.hidden_size))
        scales = itertools.repeat(scale if self.fp8_cache else None, len(layers))
        return weights, (cache,) * len(layers), tuple(scales)
