"""Finds the beginnings that waiting prompts share, after which a state of fixed size is worth a snapshot.

A prompt whose beginning is computed with others in the queue keeps its state where they part from it, so that the
second one begins there already.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.sequence import CacheSalt, Sequence

MOST_COMPARED: Final = 64
"""Prompts that one is compared with, those that have waited longest: 30 us each if 2,000 tokens are equal."""
_MOST_CUTS: Final = 4
"""Places within a prompt where its state is kept for waiting ones; each may take a step."""

_Key: TypeAlias = "tuple[CacheSalt, tuple[int, ...]]"


def common_tokens(a: list[int], b: list[int], unit: int, most: int, start: int = 0) -> int:
    """Return the number of leading tokens that two lists share, in whole units.

    Args:
        a: a list.
        b: another one.
        unit: tokens.
        most: tokens that count.
        start: a multiple of `unit`; if they share no more than so many tokens, the result is 0.
    """
    low, high = start // unit, min(most, len(a), len(b)) // unit
    first = low * unit
    # The next unit first: beginnings mostly differ there, if anywhere.
    is_longer = low < high and a[first : first + unit] == b[first : first + unit]
    if not is_longer or a[:first] != b[:first]:
        return 0
    low += 1
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * unit : middle * unit] == b[low * unit : middle * unit]:
            low = middle
        else:
            high = middle - 1
    return low * unit


class SharedBeginnings:
    """Owns an index of the waiting prompts by their first tokens. Part of `LiveSequences`.

    Args:
        unit: beginnings are compared in units of so many tokens; shorter prompts have none.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._groups: dict[_Key, dict[Sequence, None]] = {}
        self._key_of: dict[Sequence, _Key] = {}

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that waits."""
        if sequence.num_prompt_tokens <= self._unit:
            return
        key = sequence.cache_salt, tuple(sequence.token_ids[: self._unit])
        self._key_of[sequence] = key
        self._groups.setdefault(key, {})[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that does not wait any more."""
        key = self._key_of.pop(sequence, None)
        if key is None:
            return
        group = self._groups[key]
        del group[sequence]
        if not group:
            del self._groups[key]

    def partings(self, sequence: Sequence, start: int) -> list[int]:
        """Return the numbers of tokens, multiples of the unit, after which others part from a prompt that waits.

        Args:
            sequence: that is about to be admitted.
            start: tokens of it that are cached; only larger numbers count.

        Returns:
            At most `_MOST_CUTS`, those which save most tokens.
        """
        key = self._key_of.get(sequence)
        if key is None or len(group := self._groups[key]) < 2:
            return []
        counts: Counter[int] = Counter()
        for other in islice(group, MOST_COMPARED + 1):
            if other is not sequence:
                # The last token of a prompt does not count, since it is computed in any case.
                most = min(sequence.num_prompt_tokens, other.num_prompt_tokens) - 1
                unit = self._unit
                counts[common_tokens(sequence.token_ids, other.token_ids, unit, most, start)] += 1
        del counts[0]
        return sorted(counts, key=lambda it: counts[it] * (it - start), reverse=True)[:_MOST_CUTS]

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Assert that exactly these sequences are in the index, as far as they are long enough."""
        long = {it for it in waiting if it.num_prompt_tokens > self._unit}
        assert long == self._key_of.keys()
        members = [(it, key) for key, group in self._groups.items() for it in group]
        assert len(members) == len(long)
        assert dict(members) == self._key_of
