"""What an adapter adds to the matrices of a model, in the order in which the model holds their rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import torch

from model.checkpoint.parameter_parts import ParameterPart, named_parts
from model.decoder import DecoderLM
from model.errors import AdapterError
from model.network.adapter_slots import Update, Updates
from model.network.matrix import shard
from model.network.matrix_shapes import MatrixShape, matrix_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.collective.communicator import Communicator
    from model.adapters.adapter import Adapter
    from model.checkpoint.config import ModelConfig

_META: Final = torch.device("meta")


class UpdateReader:
    """Prepares adapters for a model, or for a rank's part of it.

    A rank has the rows of B whose outputs it computes, and the columns of A whose inputs it has. So the sum over all
    ranks of what they add to the residual stream is what the whole adapter adds.

    Args:
        config: of the model.
        communicator: of the ranks that share it; None for a model that is whole.
    """

    def __init__(self, config: ModelConfig, communicator: Communicator | None = None) -> None:
        model = DecoderLM(config, device=_META, communicator=communicator)
        self._parts = named_parts(model)
        self._shapes = matrix_shapes(model.network)
        self._rank = 0 if communicator is None else communicator.rank

    def read(self, adapter: Adapter, dtype: torch.dtype) -> Updates:
        """Return what an adapter adds, on the CPU.

        Args:
            adapter: of the model; read from its file.
            dtype: of the result, to which it is rounded from float32.

        Raises:
            AdapterError: `dtype` cannot hold its numbers.
        """
        updates: Updates = {}
        for name, module in adapter.modules.items():
            target = module.target
            shape = self._shapes[target.layer][target.matrix]
            key = (target.layer, target.matrix)
            update = updates.get(key)
            if update is None:
                update = updates[key] = _empty(shape, adapter.rank, dtype)
            a = torch.from_numpy(adapter.file.read(module.a))
            b = torch.from_numpy(adapter.file.read(module.b)) * module.scale
            first, stop = target.parts
            rows = _rows(self._parts[f"{name}.weight"], b, self._rank)
            start = sum(shape.parts[:first])
            update.a[first:stop, : module.rank] = shard(a, (len(a), shape.inputs), self._rank)
            update.b[: module.rank, start : start + len(rows)] = rows.t()
        ends = torch.stack(
            [end for update in updates.values() for it in update for end in it.aminmax()]
        )
        if not bool(ends.isfinite().all()):
            raise AdapterError(
                f"{str(dtype).removeprefix('torch.')} cannot hold the adapter's numbers: set --dtype to bfloat16 or"
                " float32"
            )
        return updates


def _empty(shape: MatrixShape, rank: int, dtype: torch.dtype) -> Update:
    count, outputs = len(shape.parts), sum(shape.parts)
    return Update(
        torch.zeros(count, rank, shape.inputs, dtype=dtype),
        torch.zeros(rank, outputs, dtype=dtype),
    )


def _rows(part: ParameterPart, b: Tensor, rank: int) -> Tensor:
    """Return the rows of B, [N, R], as a rank's model holds those of the matrix."""
    held = torch.empty(sum(it.count for it in part.rows), b.shape[1], device=_META)
    of_rows = dataclasses.replace(part, values=held, transposed=False, row_size=None)
    return torch.cat(of_rows.loaded(b, rank))
