"""Undoes the packing of quantized tensors in GGUF files: from blocks of bytes to the numbers and scales of a `Weight`.

Numbers stay what they are; only their places change, and numbers of 5 or 6 bits get a byte each. The scale of a group
of a K-quant is the product of two numbers in the file, which float32 holds exactly.

Source: ggml-common.h and ggml-quants.c of the ggml project, which define the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.weight_format import WeightFormat
from kernels.weights import Weight
from model.gguf.tensor_types import QUANTIZED

_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that the four bits of IQ4_NL and IQ4_XS stand for."""
_CHUNK_BYTES: Final = 1 << 24
"""Of blocks that are unpacked at once, so that a large matrix needs no copies of its size."""


class Unpacked(NamedTuple):
    """Blocks [B, ...] after unpacking.

    Attributes:
        numbers: [B, elements of a block], uint8 or int8; those of 4 bits one in a byte.
        scale: [B, groups of a block].
        shift: as `scale`; None if the type has none.
    """

    numbers: Tensor
    scale: Tensor
    shift: Tensor | None = None


def read_blocks(form: WeightFormat, shape: tuple[int, int], raw: Tensor) -> Weight:
    """Return the matrix of a tensor in a file.

    Args:
        form: of one of `model.gguf.tensor_types.QUANTIZED`.
        shape: [N, C].
        raw: the bytes of its rows, [N, bytes of a row] uint8.
    """
    weight = Weight.empty(form, shape, "cpu")
    unpack = _UNPACK[form.name]
    rows = max(1, _CHUNK_BYTES // raw.shape[1])
    for start in range(0, shape[0], rows):
        part = weight.rows(start, min(start + rows, shape[0]))
        count = part.shape[0]
        found = unpack(
            raw[start : start + count]
            .reshape(count, -1, QUANTIZED[form.name].num_bytes)
            .flatten(0, 1)
        )
        numbers = found.numbers.reshape(count, shape[1])
        if form.bits == 4:
            numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
        part.numbers.copy_(numbers)
        for name, tensor in part.scales.items():
            tensor.copy_(getattr(found, name).reshape(tensor.shape))
    return weight


def _float16(raw: Tensor) -> Tensor:
    """Return pairs of bytes [B, 2 n] as float16 [B, n]."""
    return raw.contiguous().view(torch.float16)


def _halves(raw: Tensor) -> Tensor:
    """Return the lower halves of bytes [B, n], and then the upper ones: [B, 2 n]."""
    return torch.cat((raw & 15, raw >> 4), 1)


def _high_bits(raw: Tensor) -> Tensor:
    """Return 32 bits [B, 4] one by one, [B, 32]."""
    places = torch.arange(8, dtype=torch.uint8)
    return (raw[:, :, None] >> places & 1).flatten(1)


def _q4_0(raw: Tensor) -> Unpacked:
    return Unpacked(_halves(raw[:, 2:]), _float16(raw[:, :2]))


def _q4_1(raw: Tensor) -> Unpacked:
    return Unpacked(_halves(raw[:, 4:]), _float16(raw[:, :2]), _float16(raw[:, 2:4]))


def _q5_0(raw: Tensor) -> Unpacked:
    numbers = _halves(raw[:, 6:]) | _high_bits(raw[:, 2:6]) << 4
    return Unpacked(numbers.view(torch.int8) - 16, _float16(raw[:, :2]))


def _q5_1(raw: Tensor) -> Unpacked:
    numbers = _halves(raw[:, 8:]) | _high_bits(raw[:, 4:8]) << 4
    return Unpacked(numbers.view(torch.int8), _float16(raw[:, :2]), _float16(raw[:, 2:4]))


def _q8_0(raw: Tensor) -> Unpacked:
    return Unpacked(raw[:, 2:].view(torch.int8), _float16(raw[:, :2]))


def _iq4_nl(raw: Tensor) -> Unpacked:
    levels = torch.tensor(_LEVELS, dtype=torch.int8)
    return Unpacked(levels[_halves(raw[:, 2:]).long()], _float16(raw[:, :2]))


def _iq4_xs(raw: Tensor) -> Unpacked:
    levels = torch.tensor(_LEVELS, dtype=torch.int8)
    high = raw[:, 2:4].contiguous().view(torch.int16)[:, :1].int()
    groups = torch.arange(8)
    low = raw[:, 4:8].repeat_interleave(2, 1).int() >> (groups % 2 * 4) & 15
    scale = (low | (high >> (groups * 2) & 3) << 4) - 32
    numbers = raw[:, 8:].view(-1, 8, 16)
    numbers = torch.cat((numbers & 15, numbers >> 4), 2).flatten(1)
    return Unpacked(levels[numbers.long()], _float16(raw[:, :2]).float() * scale)


def _q2_k(raw: Tensor) -> Unpacked:
    scales, numbers = raw[:, :16], raw[:, 16:80].reshape(-1, 2, 1, 32)
    places = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    d, smallest = (_float16(raw[:, start : start + 2]).float() for start in (80, 82))
    return Unpacked(
        (numbers >> places & 3).flatten(1), d * (scales & 15), -(smallest * (scales >> 4))
    )


def _q3_k(raw: Tensor) -> Unpacked:
    high, numbers, scales = raw[:, :32], raw[:, 32:96].reshape(-1, 2, 1, 32), raw[:, 96:108]
    places = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)
    low_bits = (numbers >> places[:, None] & 3).flatten(1)
    high_bits = (high[:, None] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1)
    low = torch.cat((scales[:, :8] & 15, scales[:, :8] >> 4), 1)
    upper = (scales[:, None, 8:] >> places[:, None] & 3).flatten(1)
    scale = (low | upper << 4).float() - 32
    # Three bits, less 4: the highest is stored in a mask.
    return Unpacked(low_bits | high_bits << 2, _float16(raw[:, 108:110]).float() * scale)


def _scales_of_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and shifts [B, 8] of the groups of Q4_K and Q5_K, from the first 16 bytes of their blocks."""
    d, smallest = (_float16(raw[:, start : start + 2]).float() for start in (0, 2))
    first, second, third = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = torch.cat((first & 63, third & 15 | first >> 2 & 48), 1)
    least = torch.cat((second & 63, third >> 4 | second >> 2 & 48), 1)
    return d * scale, -(smallest * least)


def _nibbles_of_k(raw: Tensor) -> Tensor:
    """Return 4 bits of each number [B, 256] of Q4_K and Q5_K: 32 lower halves and then their upper ones."""
    parts = raw.reshape(-1, 4, 1, 32) >> torch.tensor((0, 4), dtype=torch.uint8)[:, None]
    return (parts & 15).flatten(1)


def _q4_k(raw: Tensor) -> Unpacked:
    return Unpacked(_nibbles_of_k(raw[:, 16:]), *_scales_of_k(raw))


def _q5_k(raw: Tensor) -> Unpacked:
    high = (raw[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1)
    numbers = _nibbles_of_k(raw[:, 48:]) | high << 4
    return Unpacked(numbers.view(torch.int8), *_scales_of_k(raw))


def _q6_k(raw: Tensor) -> Unpacked:
    low = (
        raw[:, :128].reshape(-1, 2, 1, 64) >> torch.tensor((0, 4), dtype=torch.uint8)[:, None] & 15
    )
    places = torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> places & 3
    numbers = low.flatten(1) | high.flatten(1) << 4
    scale = _float16(raw[:, 208:210]).float() * raw[:, 192:208].contiguous().view(torch.int8)
    return Unpacked(numbers.view(torch.int8) - 32, scale)


_UNPACK: Final[Mapping[str, Callable[[Tensor], Unpacked]]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
