"""Compares stored tensors that a configuration implies with what it implies.

The configuration decides, as in transformers 5; what differs is said, since then one of both is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from kernels.weights import Weight
from model.checkpoint.files.shards import read_tensors
from model.checkpoint.formats.format import StoredTensor
from model.checkpoint.stored_names import Buffer
from model.checkpoint.stored_parts import StoredPart
from model.network.rope import inverse_frequencies
from model.network.spec import Network, Rotary

_ROWS: Final = 4096
"""Rows of a matrix that are compared at a time."""
_MOST_NUMBERS: Final = 1 << 26
"""Numbers of a buffer that is compared. Masks of 2,048 positions have 2**22."""
_RTOL: Final = 0.02
_ATOL: Final = 1e-6
"""Frequencies may be stored in 16 bits."""


def different_buffers(
    buffers: Mapping[str, tuple[Buffer, StoredTensor]], network: Network
) -> Iterator[str]:
    """Yield the names of stored buffers that differ from what a network implies."""
    rotations = [it for pair in network.rotaries for it in _rotations(*pair)]
    compared = {
        name: entry
        for name, (kind, entry) in buffers.items()
        if kind in (Buffer.ROTARY, Buffer.MASK, Buffer.POSITIONS)
        and 0 < math.prod(entry.shape) <= _MOST_NUMBERS
    }
    for name, tensor in read_tensors(compared):
        kind = buffers[name][0]
        if kind is Buffer.ROTARY:
            is_equal = not rotations or any(_is_close(tensor, it) for it in rotations)
        elif kind is Buffer.MASK:
            is_equal = _is_causal(tensor)
        else:
            flat = tensor.flatten()
            is_equal = torch.equal(flat.long(), torch.arange(len(flat)))
        if not is_equal:
            yield name


def are_equal(first: StoredPart, second: StoredPart) -> bool:
    """Whether two matrices of a checkpoint have the same values."""
    if first.shape != second.shape:
        return False
    whole = [_read(part) for part in (first, second)]
    count = first.shape[0]
    return all(
        torch.equal(*(it.rows(start, min(start + _ROWS, count)).dequantize(torch.float32) for it in whole))
        for start in range(0, count, _ROWS)
    )  # fmt: skip


def _read(part: StoredPart) -> Weight:
    scales = dict(read_tensors(dict(part.scales.values())))
    ((_, tensor),) = read_tensors({part.name: part.entry})
    matrix = part.read(tensor, scales)
    assert isinstance(matrix, Weight)
    return matrix


def _rotations(rotary: Rotary | None, head_dim: int) -> Iterator[Tensor]:
    """Yield the frequencies that a file may have: those in use, of either length, and those before any scaling."""
    if rotary is None:
        return
    pairs = (rotary.dims or head_dim) // 2
    plain = Rotary(theta=rotary.theta, dims=rotary.dims)
    yield inverse_frequencies(rotary, head_dim)[:pairs]
    yield inverse_frequencies(plain, head_dim)[:pairs]
    if rotary.rope_type == "longrope":
        yield inverse_frequencies(rotary, head_dim, long=True)[:pairs]


def _is_close(stored: Tensor, expected: Tensor) -> bool:
    flat = stored.flatten().float()
    return flat.shape == expected.shape and torch.allclose(flat, expected, _RTOL, _ATOL)


def _is_causal(mask: Tensor) -> bool:
    """Whether the last two dimensions are 1 up to the diagonal and 0 beyond."""
    rows, columns = mask.shape[-2:]
    return rows == columns and bool((mask.bool() == torch.ones(rows, rows).tril().bool()).all())
