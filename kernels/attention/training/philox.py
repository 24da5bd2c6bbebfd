"""Random numbers that depend on a position alone: Philox with 10 rounds, keyed by a seed.

Whether a weight of the attention is dropped depends on the counter (key, query, head, sequence), so it does not depend
on tiles, and the forward pass, both backward passes and every device agree.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDS: Final = 10
_FACTORS: Final = (0xD2511F53, 0xCD9E8D57)
_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = 0xFFFFFFFF


def drop_below(dropout_p: float) -> int:
    """Return the number below which a random number of 32 bits drops its weight."""
    return min(_LOW, round(dropout_p * 2**32))


def random_bits(seed: int, key: Tensor, query: Tensor, head: Tensor, sequence: int) -> Tensor:
    """Return 32 random bits for each position, as int64.

    Args:
        seed: 64 bits.
        key: int64, broadcast with the others; index in its sequence.
        query: int64; index in its sequence.
        head: int64; index of the query head.
        sequence: index of the sequence.
    """
    zero = (key + query + head) * 0  # has the shape of all of them
    counter = [zero + key, zero + query, zero + head, zero + sequence]
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(_ROUNDS):
        # A product of two numbers of 32 bits wraps around in int64; its bits are right.
        second, first = counter[2] * _FACTORS[1], counter[0] * _FACTORS[0]
        counter = [
            ((second >> 32) & _LOW) ^ counter[1] ^ keys[0],
            second & _LOW,
            ((first >> 32) & _LOW) ^ counter[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(it + step) & _LOW for it, step in zip(keys, _STEPS, strict=True)]
    return counter[0]
