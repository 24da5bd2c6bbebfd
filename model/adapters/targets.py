"""The linear layers of a network that an adapter may change, by the names of its checkpoint. Imports no PyTorch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from model.errors import AdapterError
from model.families.table import FAMILIES
from model.network.matrix_shapes import matrix_shapes

if TYPE_CHECKING:
    from model.checkpoint.config import ModelConfig


class Target(NamedTuple):
    """A linear layer of the checkpoint.

    Attributes:
        layer: its index.
        matrix: of the layer that has its rows, such as qkv, output, gate_up or down.
        parts: which of `MatrixShape.parts`, from the first to before the last.
        inputs, outputs: its sizes.
    """

    layer: int
    matrix: str
    parts: tuple[int, int]
    inputs: int
    outputs: int


def find_targets(config: ModelConfig) -> dict[str, Target]:
    """Return the linear layers of a model by their names in a checkpoint, without `.weight`.

    Raises:
        AdapterError: the model's layers cannot have adapters.
    """
    network = config.network
    if network.modules is not None:
        raise AdapterError(
            f"{config.architecture} cannot have adapters: modules of transformers compute it"
        )
    tensors = FAMILIES[config.architecture].tensors
    found = {}
    for index, matrices in enumerate(matrix_shapes(network)):
        for matrix, (modules, outputs, inputs) in matrices.items():
            named = [(tensors.layer_modules[it], at) for at, it in enumerate(modules)]
            for name, same in itertools.groupby(named, lambda it: it[0]):
                parts = [at for _, at in same]
                first, stop = parts[0], parts[-1] + 1
                size = sum(outputs[first:stop])
                full = f"{tensors.prefix}{tensors.layers}{index}.{name}"
                found[full] = Target(index, matrix, (first, stop), inputs, size)
    return found
