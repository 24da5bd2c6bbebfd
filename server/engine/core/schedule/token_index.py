"""Finds the earlier places of a text that the end of another one, or its own, repeats.

Hash chains, as in deflate: an n-gram leads to its last place, and each place to the one before it with the same n-gram.
A token takes constant time, whatever the length of the text, and about 130 bytes.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ORDER: Final = 3
"""Tokens that a match has at least. After two, every second text goes on in another way than before."""
END: Final = -1
"""Stands between texts of one index: no match and no continuation passes it."""
MOST_MATCHED: Final = 32
"""Tokens of a match that are counted."""
_BITS: Final = 21
_MOST_PLACES: Final = 8


class Match(NamedTuple):
    """A place of an index whose text ends like another text.

    Attributes:
        place: of the token after the repeated ones.
        length: tokens that are equal, from `ORDER` to `MOST_MATCHED`.
    """

    place: int
    length: int


class TokenIndex:
    """An index of a list of token ids that only grows.

    Args:
        token_ids: the list; the index keeps it, and `update` enters what was appended.
        first: where the index begins.

    Attributes:
        token_ids: see above.
    """

    def __init__(self, token_ids: list[int], first: int = 0) -> None:
        self.token_ids = token_ids
        self._first = first
        self._last: dict[int, int] = {}  # by n-gram, the place after its last occurrence
        self._before = array(
            "q"
        )  # by place, less `_first`, the place before with the same n-gram; -1 for none

    @property
    def is_complete(self) -> bool:
        """Whether all tokens are entered but the last, which nothing follows."""
        return self._first + len(self._before) >= len(self.token_ids)

    @property
    def num_indexed(self) -> int:
        """Tokens that were entered."""
        return len(self._before)

    def update(self, most: int) -> int:
        """Enter the n-grams that a token follows by now, `most` at most; return how many were entered."""
        ids, last, before = self.token_ids, self._last, self._before
        start = place = self._first + len(before)
        stop = min(len(ids), place + most)
        while place < stop:
            previous = -1
            if place - self._first >= ORDER:
                a, b, c = ids[place - 3], ids[place - 2], ids[place - 1]
                if a >= 0 and b >= 0 and c >= 0:
                    key = (a << _BITS | b) << _BITS | c
                    previous = last.get(key, -1)
                    last[key] = place
            before.append(previous)
            place += 1
        return place - start

    def longest_match(self, text: Sequence[int], near: int = -1) -> Match | None:
        """Return the place that follows the most tokens that `text` ends with, the last one among equals.

        Args:
            text: at least one token.
            near: a place that is probably one of the best; -1 for none.
        """
        if len(text) < ORDER:
            return None
        a, b, c = text[-3:]
        place = self._last.get((a << _BITS | b) << _BITS | c, -1)
        best = 0
        found = -1
        if near >= ORDER and near < len(self.token_ids):
            best, found = self._length(text, near), near
        for _ in range(_MOST_PLACES):
            if place < 0 or best >= MOST_MATCHED:
                break
            length = self._length(text, place)
            if length > best:
                best, found = length, place
            place = self._before[place - self._first]
        return Match(found, best) if best >= ORDER else None

    def continuation(self, place: int, limit: int) -> tuple[int, ...]:
        """Return up to `limit` tokens from a place on.

        At the end of the text they repeat those from the place on, as a text does that repeats itself.
        """
        ids = self.token_ids
        found = ids[place : place + limit]
        if END in found:
            return tuple(found[: found.index(END)])
        while found and len(found) < limit:
            found += found[: limit - len(found)]
        return tuple(found)

    def _length(self, text: Sequence[int], place: int) -> int:
        """Return how many tokens before a place `text` ends with, `MOST_MATCHED` at most."""
        ids = self.token_ids
        most = min(MOST_MATCHED, place, len(text))
        for length in range(most):
            if ids[place - 1 - length] != text[-1 - length] or text[-1 - length] < 0:
                return length
        return most
