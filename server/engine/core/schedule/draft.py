"""Proposes the tokens that may follow those of a sequence, without a model.

Most of what an edit, a summary or a tool's arguments have as text stands in the prompt, in the output so far, or in an
earlier answer. A drafter only has to be right often: a step computes what it proposes beside the sequence's own token
and keeps what the model samples, so a wrong draft costs time and changes nothing.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from server.engine.core.schedule.token_index import END, ORDER, TokenIndex

if TYPE_CHECKING:
    from server.engine.core.sequence import CacheSalt, Sequence

_CLASSES: Final = (4, 6, 9, 16)
"""Lengths of matches from which on the next class begins."""
NUM_CLASSES: Final = len(_CLASSES) + 1
_MOST_INDEXED: Final = 1 << 16
"""Tokens of a prompt that are indexed, the last ones: with 130 bytes each, 8 MB."""
_MOST_POOLED: Final = 1 << 15
"""Tokens of the answers of one salt that are kept at least; twice as many at most."""
_MOST_POOLS: Final = 1 << 17
"""Tokens of all salts, 17 MB."""


class Draft(NamedTuple):
    """Tokens proposed to follow those of a sequence.

    Attributes:
        tokens: the first of them first; empty for none.
        certainty: a class from 0 to `NUM_CLASSES` - 1: drafts of a higher one are right more often.
    """

    tokens: tuple[int, ...]
    certainty: int


NO_DRAFT: Final = Draft((), 0)


class Drafter(Protocol):
    """Proposes tokens; the scheduler has one. Called for sequences whose tokens are all known."""

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """Return at most `limit` tokens, 1 or more, that may follow those of a running sequence."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended, or keep its answer for later ones."""


class LookupDrafter:
    """Proposes what followed the same tokens before: in the sequence, or in earlier answers with its cache salt.

    Answers are only shared where the blocks of the prefix cache are, since the speed of a reply shows that a part of it
    was computed before.

    Args:
        pools: whether earlier answers are used.
    """

    def __init__(self, *, pools: bool = True) -> None:
        self._pools = pools
        self._texts: dict[Sequence, _Text] = {}
        self._pool_of: OrderedDict[CacheSalt, TokenIndex] = OrderedDict()

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """See `Drafter`: the continuation of the longest match, that of the sequence's own text among equals."""
        matcher = sequence.matcher
        if matcher is not None and not sequence.sampling.skips_forced_tokens:
            forced = tuple(matcher.forced_tokens()[:limit])
            if forced:
                return Draft(forced, NUM_CLASSES - 1)
        text = self._texts.get(sequence)
        if text is None:
            first = max(0, sequence.num_tokens - _MOST_INDEXED)
            text = self._texts[sequence] = _Text(TokenIndex(sequence.token_ids, first))
        index, known = text.index, sequence.token_ids
        index.update()
        pool = self._pool_of.get(sequence.cache_salt)
        near = text.place + len(known) - text.num_tokens
        found = index.longest_match(known, near if text.source is index else -1)
        if pool is not None:
            other = pool.longest_match(known, near if text.source is pool else -1)
            if other is not None and (found is None or other.length > found.length):
                found, index = other, pool
        if found is None:
            text.source = None
            return NO_DRAFT
        text.source, text.place, text.num_tokens = index, found.place, len(known)
        tokens = index.continuation(found.place, limit)
        return Draft(tokens, bisect.bisect_right(_CLASSES, found.length))

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._texts.pop(sequence, None)
        if not self._pools or sequence.num_output_tokens < ORDER:
            return
        salt = sequence.cache_salt
        pool = self._pool_of.pop(salt, None)
        if pool is None:
            pool = TokenIndex([])
        if len(pool.token_ids) > 2 * _MOST_POOLED:
            pool = TokenIndex(pool.token_ids[-_MOST_POOLED:])
        # With the end of the prompt, which the answer's first tokens follow.
        first = max(0, sequence.num_prompt_tokens - ORDER, sequence.num_tokens - _MOST_POOLED)
        pool.token_ids += [*sequence.token_ids[first:], END]
        while not pool.is_complete:
            pool.update()
        self._pool_of[salt] = pool
        total = sum(len(it.token_ids) for it in self._pool_of.values())
        while total > _MOST_POOLS and len(self._pool_of) > 1:
            total -= len(self._pool_of.popitem(last=False)[1].token_ids)


class _Text:
    """The index of a sequence's tokens, and where its last draft was found.

    Attributes:
        index: of its tokens.
        source: the index of the last match; None without one.
        place: of the match there.
        num_tokens: of the sequence then.
    """

    __slots__ = ("index", "num_tokens", "place", "source")

    def __init__(self, index: TokenIndex) -> None:
        self.index = index
        self.source: TokenIndex | None = None
        self.place = self.num_tokens = 0
