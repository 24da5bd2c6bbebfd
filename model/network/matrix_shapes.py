"""The sizes of the matrices of layers, and of the adapters that change them. Imports no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from model.network.spec import Network


_STACKED: Final = {
    ("qkv", 1): ("q",),
    ("qkv", 2): ("q", "k"),
    ("qkv", 3): ("q", "k", "v"),
    ("qkv", 4): ("q_gate", "q", "k", "v"),
    ("gate_up", 1): ("up",),
    ("gate_up", 2): ("gate", "up"),
    ("input", 2): ("mixed_in", "z"),
    ("gates", 2): ("beta", "alpha"),
    ("input", 5): ("z", "x", "b", "c", "dt"),
}
"""The modules whose rows a matrix of a layer stacks, by the number of them."""


def stacked_modules(matrix: str, count: int) -> tuple[str, ...]:
    """Return the modules whose rows a matrix of a layer stacks, by the names of `model.families.tensors`.

    Args:
        matrix: its name.
        count: how many they are: fewer than there may be without a gate, or without projections of keys and values.
    """
    return _STACKED.get((matrix, count), (matrix,))


_STORED_IN: Final = {"q_gate": "q", **dict.fromkeys(("x", "b", "c", "dt"), "z")}
"""Modules whose rows the checkpoints of all families have in the matrix of another one."""
_RANK_ALIGNMENT: Final = 16
"""Ranks are rounded up to a power of two from this number on, as kernels for GPUs multiply them."""


class MatrixShape(NamedTuple):
    """A matrix of a layer.

    Attributes:
        modules: the parts that it stacks, by the names of `model.families.tensors`. Modules that the checkpoints of all
            families store in one matrix are one part, because they have the same adapter.
        parts: outputs of each part.
        inputs: its inputs.
    """

    modules: tuple[str, ...]
    parts: tuple[int, ...]
    inputs: int


def matrix_shapes(network: Network) -> list[dict[str, MatrixShape]]:
    """Return the matrices of each layer by name."""
    hidden = network.hidden
    return [
        {
            name: _matrix_shape(name, *shape)
            for part in it.parts
            for name, shape in part.matrices(hidden).items()
        }
        for it in network.layers
    ]


def _matrix_shape(matrix: str, rows: tuple[int, ...], inputs: int) -> MatrixShape:
    parts: dict[str, int] = {}
    for module, count in zip(stacked_modules(matrix, len(rows)), rows, strict=True):
        name = _STORED_IN.get(module, module)
        parts[name] = parts.get(name, 0) + count
    return MatrixShape(tuple(parts), tuple(parts.values()), inputs)


def slot_rank(rank: int) -> int:
    """Return the rank of a slot for adapters of up to `rank`."""
    return max(_RANK_ALIGNMENT, 1 << (rank - 1).bit_length())


def slot_bytes(network: Network, rank: int, item_bytes: int) -> int:
    """Return the bytes of a slot for an adapter.

    Args:
        network: of the model, or of what a rank computes of it.
        rank: the largest of an adapter.
        item_bytes: of a number.
    """
    matrices = (it for layer in matrix_shapes(network) for it in layer.values())
    numbers = sum(len(it.parts) * it.inputs + sum(it.parts) for it in matrices)
    return numbers * slot_rank(rank) * item_bytes
