"""The sizes of the matrices of layers. Imports no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from model.network.spec import Network


STACKED: Final = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""The modules whose rows a matrix of a layer stacks; without a gate it has those of the last one."""


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
            for name, shape in {**it.mixer.matrices(hidden), **it.mlp.matrices(hidden)}.items()
        }
        for it in network.layers
    ]
