"""The sizes of a model's weights, from its network alone. Imports no PyTorch, unlike the parameters that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kernels.weight_format import unquantized
from model.network.parallel import head_rows, shard_network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.weight_format import WeightFormat
    from model.network.spec import Layer, Network, Norm

_FLOAT32_BYTES: Final = 4


class ModelSizes:
    """What a `DecoderLM` would be, as far as its sizes go; attributes are those of `DecoderLM`.

    Args:
        network: what all ranks together compute.
        dtype: name of the dtype of parameters and activations.
        weight_format: of the layers' matrices; None for full numbers.
        num_ranks: that share the model; the sizes are those of one.
    """

    def __init__(
        self, network: Network, dtype: str, weight_format: WeightFormat | None, num_ranks: int
    ) -> None:
        self.whole_network, self.dtype_name, self.num_ranks = network, dtype, num_ranks
        self.network = shard_network(network, num_ranks)
        self.weight_format = weight_format or unquantized(dtype)
        self.weight_bytes = _weight_bytes(self.network, dtype, self.weight_format, num_ranks)


def table_bytes(network: Network, dtype: str, num_ranks: int) -> int:
    """Return the bytes of all tables of embeddings, and of the rows of the head that a rank has."""
    rows = network.vocab if network.tied else network.vocab + head_rows(network.vocab, num_ranks)
    if network.positions is not None:
        rows += network.positions.count + network.positions.offset
    return (rows * network.hidden + _per_layer_table(network)) * dtype_bytes(dtype)


def _per_layer_table(network: Network) -> int:
    """Return the elements of the table of `Network.per_layer`."""
    return 0 if network.per_layer is None else network.per_layer.num_table(len(network.layers))


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of a full number."""
    return unquantized(dtype).bits // 8


def _weight_bytes(network: Network, dtype: str, form: WeightFormat, num_ranks: int) -> int:
    element, hidden = dtype_bytes(dtype), network.hidden
    total = table_bytes(network, dtype, num_ranks)
    total += _norm_bytes(network.norm, hidden, element)
    total += network.head_bias * head_rows(network.vocab, num_ranks) * element
    total += (network.num_others - _per_layer_table(network)) * element
    for layer in network.layers:
        others = layer.num_parameters(hidden)
        for rows, inputs in _matrices(layer, hidden):
            others -= sum(rows) * inputs
            ends = [sum(rows[: count + 1]) for count in range(len(rows) - 1)]
            total += form.divided(0, *ends).num_bytes((sum(rows), inputs))
        wide = layer.num_float32(hidden)
        total += (others - wide) * element + wide * _FLOAT32_BYTES
    return total


def _norm_bytes(norm: Norm, hidden: int, element: int) -> int:
    weight = _FLOAT32_BYTES if norm.float32 else element
    return hidden * (weight + (element if norm.has_bias else 0))


def _matrices(layer: Layer, hidden: int) -> Iterator[tuple[tuple[int, ...], int]]:
    for part in layer.parts:
        yield from part.matrices(hidden).values()
