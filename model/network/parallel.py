"""Tensor parallelism: each rank has some heads, some columns of the MLP and some rows of the output head.

    qkv, gate_up    rows of this rank's heads and of its part of the MLP      no communication
    output, down    the columns that belong to them                           partial sums, added over all ranks
    head            1/N of the vocabulary                                     logits, gathered from all ranks

Every rank has the whole embedding and residual stream, and computes the same tokens. PyTorch is imported only by the
function that needs it, because plans and sizes do without it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.weights import Weight
    from model.network.spec import Layer, Network

Narrowable = TypeVar("Narrowable", "Tensor", "Weight")


def shard_network(network: Network, size: int) -> Network:
    """Return what the layers of one of `size` ranks compute; `parallel_unsupported` must be empty."""
    if size == 1:
        return network
    return dataclasses.replace(
        network, layers=tuple(_shard_layer(layer, size) for layer in network.layers)
    )


def _shard_layer(layer: Layer, size: int) -> Layer:
    mixer, mlp = layer.mixer, layer.mlp
    return dataclasses.replace(
        layer,
        mixer=dataclasses.replace(
            mixer, num_heads=mixer.num_heads // size, num_kv_heads=mixer.num_kv_heads // size
        ),
        mlp=dataclasses.replace(mlp, inner=mlp.inner // size),
    )


def shard(whole: Narrowable, shape: Sequence[int], rank: int) -> Narrowable:
    """Return a rank's part of a tensor or matrix, a view.

    Args:
        whole: any shape.
        shape: of the part. Dimensions that are smaller than those of `whole` are divided among the ranks. If there
            is a remainder, the last part begins earlier and repeats the end of the one before.
        rank: of the part.
    """
    for dim, (size, whole_size) in enumerate(zip(shape, whole.shape, strict=True)):
        if size != whole_size:
            whole = whole.narrow(dim, min(rank * size, whole_size - size), size)
    return whole


def shard_stacked(
    whole: Tensor, whole_rows: Sequence[int], rows: Sequence[int], rank: int
) -> Tensor:
    """Return a rank's part of stacked matrices or biases: its rows of each of them.

    Args:
        whole: [sum of whole_rows, ...].
        whole_rows: rows of each stacked tensor.
        rows: rows of each in the part.
        rank: of the part.
    """
    import torch  # noqa: PLC0415 - see the module's docstring

    stacked = zip(whole.split_with_sizes(list(whole_rows)), rows, strict=True)
    return torch.cat([shard(part, (count, *part.shape[1:]), rank) for part, count in stacked])


def head_rows(vocab_size: int, size: int) -> int:
    """Return the rows of the output head that each of `size` ranks has."""
    return -(-vocab_size // size)
