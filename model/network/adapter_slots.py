"""The slots of adapters on a device: the matrices that executors read, for a fixed number of adapters and a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from kernels.linear.lora import LoraWeights
from model.network.matrix_shapes import MatrixShape, matrix_shapes, slot_rank

if TYPE_CHECKING:
    from torch import Tensor

    from model.network.spec import Network


class Update(NamedTuple):
    """What is added to a matrix of a layer: part p of its outputs gets x A[p]^T B, with the columns of part p.

    Attributes:
        a: [P, R, C], for each of the P parts that the matrix stacks; zeros for a part without an adapter.
        b: [R, N], of all outputs, multiplied by the scale.
    """

    a: Tensor
    b: Tensor


Updates: TypeAlias = dict[tuple[int, str], Update]
"""By layer and name of the matrix."""


class AdapterSlots:
    """Owns the memory of the slots; only `write` changes it.

    Args:
        network: of the model.
        count: number of slots.
        rank: the largest of an adapter.
        dtype: of the matrices.
        device: of the model.

    Attributes:
        layers: the matrices of each layer by name.
        ranks: [slots] int64 on the CPU, of the adapters in the slots; 0 for none.
        dtype: see above.
    """

    def __init__(
        self, network: Network, count: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.ranks = torch.zeros(count, dtype=torch.int64)
        padded = slot_rank(rank)

        def zeros(shape: MatrixShape) -> LoraWeights:
            return LoraWeights.zeros(count, padded, shape.parts, shape.inputs, dtype, device)

        self.layers = [
            {name: zeros(shape) for name, shape in matrices.items()}
            for matrices in matrix_shapes(network)
        ]
        self._written: list[set[tuple[int, str]]] = [set() for _ in range(count)]

    def __len__(self) -> int:
        return len(self.ranks)

    def write(self, slot: int, updates: Updates) -> None:
        """Copy an adapter into a slot, after the steps that are queued on the device; no sequence may use the slot.

        Args:
            slot: its number.
            updates: what the adapter adds, in `dtype`; in pinned memory they are copied asynchronously.
        """
        ranks = [len(update.b) for update in updates.values()]
        for layer, name in self._written[slot] - updates.keys():
            weights = self.layers[layer][name]
            weights.a[slot].zero_()
            weights.b[slot].zero_()
        for (layer, name), update in updates.items():
            weights = self.layers[layer][name]
            rank = len(update.b)
            _copy(weights.a[slot, :, :rank], update.a)
            _copy(weights.b[slot, :rank], update.b)
            weights.a[slot, :, rank:].zero_()
            weights.b[slot, rank:].zero_()
        self._written[slot] = set(updates)
        self.ranks[slot] = max(ranks)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
