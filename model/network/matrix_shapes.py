"""The sizes of the matrices of layers. Imports no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from model.network.spec import Network


_STACKED: Final = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def stacked_modules(matrix: str, count: int) -> tuple[str, ...]:
    """Return the modules whose rows a matrix of a layer stacks.

    Args:
        matrix: its name.
        count: how many they are: fewer than there may be without a gate, or without projections of keys and values.
    """
    modules = _STACKED.get(matrix, (matrix,))
    return modules[:count] if matrix == "qkv" else modules[-count:]


class MatrixShape(NamedTuple):
    """A matrix of a layer: the outputs of each part that it stacks, and its inputs."""

    parts: tuple[int, ...]
    inputs: int


def matrix_shapes(network: Network) -> list[dict[str, MatrixShape]]:
    """Return the matrices of each layer by name."""
    hidden = network.hidden
    return [
        {
            name: MatrixShape(*shape)
            for part in it.parts
            for name, shape in part.matrices(hidden).items()
        }
        for it in network.layers
    ]
