"""Numbers of 4 or 8 bits that a checkpoint stores several in an int32, the first one in the lowest bits.

Bytes are taken to be little-endian. Imports PyTorch: formats import this module where they read a matrix.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

WORD_BITS: Final = 32
_LOW: Final = 0x0F0F0F0F
_HIGH: Final = -0x0F0F0F10  # 0xF0F0F0F0 as an int32
_WORDS: Final = 1 << 16
"""Words that are rearranged at once, so that what is made of them fits a processor's cache."""
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of the 4-bit numbers of a word of AWQ, from the lowest bits on."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return numbers [G, N] uint8 that are packed along the rows of words [G, N * bits / 32]."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def along_inputs(words: Tensor) -> Tensor:
    """Return numbers as `Weight` has them, [N, C * bits / 8] uint8, of words [C * bits / 32, N]: the same bytes."""
    return words.t().contiguous().view(torch.uint8)


def unpack_awq(words: Tensor) -> Tensor:
    """Return 4-bit numbers [G, N] uint8 of words [G, N / 8] in the order of AWQ."""
    rows = len(words)
    in_words = unpack(words, 4).view(rows, -1, len(AWQ_ORDER))
    numbers = torch.empty_like(in_words)
    numbers[..., list(AWQ_ORDER)] = in_words
    return numbers.view(rows, -1)


def along_outputs_awq(words: Tensor) -> Tensor:
    """Return numbers as `Weight` has them, [N, C / 2] uint8, of 4-bit ones in words [C, N / 8] in the order of AWQ."""
    inputs, width = words.shape
    numbers = torch.empty((width, len(AWQ_ORDER), inputs // 2), dtype=torch.uint8)
    step = max(1, _WORDS // inputs)
    for first in range(0, width, step):
        rows = slice(first, min(first + step, width))
        turned = words[:, rows].t().contiguous()
        even, odd = turned[:, ::2], turned[:, 1::2]
        low = (odd & _LOW).bitwise_left_shift_(4).bitwise_or_(even & _LOW)
        high = even.bitwise_right_shift(4).bitwise_and_(_LOW).bitwise_or_(odd & _HIGH)
        for half, columns in ((low, AWQ_ORDER[::2]), (high, AWQ_ORDER[1::2])):
            in_bytes = half.view(torch.uint8).view(len(half), inputs // 2, 4)
            for place, column in enumerate(columns):
                numbers[rows, column] = in_bytes[..., place]
    return numbers.view(-1, inputs // 2)
