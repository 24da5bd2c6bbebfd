"""The Gumbel noise of tokens in NumPy (`kernels.sampling.noise`), and its key from seed and position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.sampling.noise import FIRST_FACTOR, ID_STEP, LARGEST_FRACTION, SECOND_FACTOR

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_MIX, _SECOND_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN_WORD, _ONE = np.uint64(_GOLDEN), np.uint64(1)
# More than the sum of a logarithm and a distance can be rounded by, where the sum is that of a token that can win.
_MARGIN = 1e-4
_LOG_SCALE = 32 * math.log(2.0)
_HALF = np.float32(0.5)
_15, _16 = np.uint32(15), np.uint32(16)
_FIRST_FACTOR, _SECOND_FACTOR = np.uint32(FIRST_FACTOR), np.uint32(SECOND_FACTOR)

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Return the key of the noise of one token of one sequence, (low, high), 32 bits each.

    It depends on its arguments alone: there is no generator state, so a sampled token does not depend on the rest of
    the batch, on preemption or on how often the step was repeated.

    Args:
        seed: taken modulo 2^64. Neighbouring seeds give unrelated streams: the seed is mixed before use.
        position: >= 0.

    Source: SplitMix64 (Steele, Lea, Flood 2014), its state set to the mixed seed and advanced by `position`.
    """
    state = (_mix((seed + _GOLDEN) & _MASK64) + (position + 1) * _GOLDEN) & _MASK64
    key = _mix(state)
    return key & _MASK32, key >> 32


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return `noise_key` of several tokens: [2, R], the low halves and the high ones.

    Args:
        seeds: R seeds.
        positions: R positions.
    """
    mixed = _mix_all(np.array([seed & _MASK64 for seed in seeds], np.uint64) + _GOLDEN_WORD)
    keys = _mix_all(mixed + (np.array(positions, np.uint64) + _ONE) * _GOLDEN_WORD)
    return np.stack((keys & np.uint64(_MASK32), keys >> np.uint64(32)))


def _mix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply `_mix` to each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST_MIX)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND_MIX)
    return values ^ (values >> np.uint64(31))


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST_MIX) & _MASK64
    value = ((value ^ (value >> 27)) * _SECOND_MIX) & _MASK64
    return value ^ (value >> 31)


class HostNoise:
    """Samples tokens by the Gumbel-max rule in NumPy. It owns scratch memory for one row.

    Not thread-safe.

    Args:
        size: of the vocabulary.
    """

    def __init__(self, size: int) -> None:
        self._steps = np.arange(size, dtype=np.uint32) * np.uint32(ID_STEP)
        self._words = np.empty(size, np.uint32)
        self._shifted = np.empty(size, np.uint32)
        self._floats = np.empty(size, np.float32)

    def argmax(self, distances: Floats, key: tuple[int, int], ids: Ints | None) -> int:
        """Return the position of the token with the largest sum of noise minus distance.

        Args:
            distances: [n] float32, >= 0: how far below the largest one each scaled logit is. At least one is finite.
            key: from `noise_key`.
            ids: [n], the tokens' ids, any order; None for 0 to n - 1.

        Returns:
            A position in [0, n); of equal sums that of the smallest id.
        """
        words = self._hash(len(distances), key, ids)
        # -log(1 - v) >= v bounds the sum by -(log(v) + distance): with one fast logarithm of float32, nearly all tokens
        # are known to lose. Only the others need the exact sum. The bound leaves out the factor of v.
        bounds = self._floats[: len(distances)]
        np.copyto(bounds, words, casting="unsafe")
        bounds += _HALF
        np.log(bounds, out=bounds)
        bounds += distances
        likely = bounds.argmin()
        least = math.log(_race_time(int(words[likely]))) + distances[likely] + _LOG_SCALE + _MARGIN
        places = np.flatnonzero(bounds <= np.float32(least))
        if len(places) == 1:
            return int(places[0])
        sums = _noise_of(words[places]) - distances[places]
        best = places[sums == sums.max()]
        return int(best[0] if ids is None else best[ids[best].argmin()])

    def _hash(self, count: int, key: tuple[int, int], ids: Ints | None) -> Words:
        """Return x of each token, a view of scratch memory."""
        words, shifted = self._words[:count], self._shifted[:count]
        if ids is None:
            np.add(self._steps[:count], np.uint32(key[0]), out=words)
        else:
            self._steps.take(ids, out=words, mode="clip")
            words += np.uint32(key[0])
        words ^= np.right_shift(words, _16, out=shifted)
        words *= _FIRST_FACTOR
        words ^= np.right_shift(words, _15, out=shifted)
        words ^= np.uint32(key[1])
        words *= _SECOND_FACTOR
        words ^= np.right_shift(words, _16, out=shifted)
        return words


def _race_time(word: int) -> float:
    return -math.log1p(-min((word + 0.5) * 2.0**-32, LARGEST_FRACTION))


def _noise_of(words: Words) -> Floats:
    fractions = (words.astype(np.float32) + _HALF) * np.float32(2.0**-32)
    noise: Floats = -np.log(-np.log1p(-np.minimum(fractions, np.float32(LARGEST_FRACTION))))
    return noise
