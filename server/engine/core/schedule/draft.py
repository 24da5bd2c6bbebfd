"""Proposes the tokens that may follow those of a sequence, without a model.

Most of what an edit, a summary or a tool's arguments have as text stands in the prompt, in the output so far, or in an
earlier answer. A drafter only has to be right often: a step computes what it proposes beside the sequence's own token
and keeps what the model samples, so a wrong draft costs time and changes nothing.
"""

from __future__ import annotations

import bisect
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from server.engine.core.schedule.token_index import END, ORDER, TokenIndex

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.sequence import CacheSalt, Sequence

log = logging.getLogger("tessera.engine")

_CLASS_STARTS: Final = (4, 6, 9, 16)
"""Lengths of matches from which on the next class begins."""
NUM_MATCH_CLASSES: Final = len(_CLASS_STARTS) + 1
_MOST_INDEXED: Final = 1 << 16
"""Tokens of a prompt that are indexed, the last ones: with 130 bytes each, 8 MB."""
_MOST_INDEXED_TEXTS: Final = 1 << 19
"""Indexed tokens of all running sequences, 68 MB; texts beyond are not indexed."""
_MOST_AT_ONCE: Final = 4096
"""Tokens that a step indexes, in about three milliseconds: it does not wait for a long prompt."""
_MOST_POOLED: Final = 1 << 15
"""Tokens of a client's answers that are kept at least; twice as many at most."""
_MOST_POOLS: Final = 1 << 17
"""Tokens of all clients, 17 MB."""


class Draft(NamedTuple):
    """Tokens proposed to follow those of a sequence.

    Attributes:
        tokens: the first of them first; empty for none.
        match_class: a class of the length of the match, from 0 to `NUM_MATCH_CLASSES` - 1: drafts of a higher one are
            right more often.
        is_predicted: whether they are from the request's prediction, and not from any other text.
    """

    tokens: tuple[int, ...]
    match_class: int
    is_predicted: bool = False


NO_DRAFT: Final = Draft((), 0)


class Drafter(Protocol):
    """Proposes tokens; the scheduler has one. Called for sequences whose tokens are all known."""

    def begin_step(self) -> None:
        """Note that drafts for another step are asked for."""

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """Return at most `limit` tokens, 1 or more, that may follow those of a running sequence."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended, or keep its answer for later ones."""


class LookupDrafter:
    """Proposes what followed the same tokens before: in the sequence, its prediction, or its client's earlier answers.

    An answer is proposed to its own client only, and within a part of the prefix cache: a reply says how many of its
    tokens were proposed, which would tell others token by token what an answer was. A step indexes a few thousand
    tokens, of all texts together.

    Args:
        pools: whether earlier answers are used.
    """

    def __init__(self, *, pools: bool = True) -> None:
        self._pools = pools
        self._texts: dict[Sequence, _SequenceIndexes] = {}
        self._pool_of: OrderedDict[tuple[CacheSalt, str], TokenIndex] = OrderedDict()
        self._left = 0

    def begin_step(self) -> None:
        """See `Drafter`."""
        used = sum(text.num_indexed for text in self._texts.values())
        self._left = min(_MOST_AT_ONCE, _MOST_INDEXED_TEXTS - used)

    def propose(self, sequence: Sequence, limit: int) -> Draft:
        """See `Drafter`: the continuation of the longest match, that of the sequence's own text among equals."""
        if forced := _forced(sequence):
            return Draft(forced[:limit], NUM_MATCH_CLASSES - 1)
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = _SequenceIndexes(sequence)
        pool = self._pool_of.get((sequence.cache_salt, sequence.client))
        sources = text.indexes if pool is None else (*text.indexes, pool)
        for index in sources:
            if not index.is_complete and self._left > 0:
                self._left -= index.update(self._left)
        return text.draft(sequence, sources, limit)

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        self._texts.pop(sequence, None)
        if not self._pools or sequence.num_output_tokens < ORDER:
            return
        owner = sequence.cache_salt, sequence.client
        pool = self._pool_of.pop(owner, None)
        if pool is None:
            pool = TokenIndex([])
        if len(pool.token_ids) > 2 * _MOST_POOLED:
            pool = TokenIndex(pool.token_ids[-_MOST_POOLED:])
        # With the end of the prompt, which the answer's first tokens follow.
        first = max(0, sequence.num_prompt_tokens - ORDER, sequence.num_tokens - _MOST_POOLED)
        pool.token_ids += [*sequence.token_ids[first:], END]
        self._pool_of[owner] = pool
        total = sum(len(it.token_ids) for it in self._pool_of.values())
        while total > _MOST_POOLS and len(self._pool_of) > 1:
            total -= len(self._pool_of.popitem(last=False)[1].token_ids)


def _forced(sequence: Sequence) -> tuple[int, ...]:
    """Return the tokens that a sequence's grammar forces, if each is computed in a step."""
    matcher = sequence.matcher
    if matcher is None or sequence.sampling.skips_forced_tokens:
        return ()
    try:
        return tuple(matcher.forced_tokens())
    except Exception:
        log.exception("the grammar of request %d cannot be read ahead", sequence.request_id)
        return ()  # the step that follows it says what is wrong


class _SequenceIndexes:
    """The indexes of a sequence's tokens and of its prediction, and where its last draft was found.

    Attributes:
        indexes: that of its tokens, and that of its prediction if it has one.
        source: the index of the last match; None without one.
        place: of the match there.
        num_tokens: of the sequence then.
    """

    __slots__ = ("indexes", "num_tokens", "place", "source")

    def __init__(self, sequence: Sequence) -> None:
        first = max(0, sequence.num_tokens - _MOST_INDEXED)
        self.indexes: tuple[TokenIndex, ...] = (TokenIndex(sequence.token_ids, first),)
        if sequence.prediction:
            self.indexes += (TokenIndex([*sequence.prediction[:_MOST_INDEXED], END]),)
        self.source: TokenIndex | None = None
        self.place = self.num_tokens = 0

    @property
    def num_indexed(self) -> int:
        """Tokens that the indexes hold."""
        return sum([index.num_indexed for index in self.indexes])

    def draft(self, sequence: Sequence, sources: Iterable[TokenIndex], limit: int) -> Draft:
        """Return what follows the longest match in some indexes, the first among equals."""
        known = sequence.token_ids
        near = self.place + len(known) - self.num_tokens
        best, place, found = 0, 0, None
        for index in sources:
            match = index.longest_match(known, near if self.source is index else -1)
            if match is not None and match.length > best:
                best, found, place = match.length, index, match.place
        self.num_tokens = len(known)
        if found is None:
            self.source = None
            return self._beginning(sequence, limit)
        self.source, self.place = found, place
        match_class = bisect.bisect_right(_CLASS_STARTS, best)
        is_predicted = found in self.indexes[1:]
        return Draft(found.continuation(place, limit), match_class, is_predicted)

    def _beginning(self, sequence: Sequence, limit: int) -> Draft:
        """Return what follows in the prediction while the output is too short for a match."""
        count = sequence.num_output_tokens
        output = sequence.token_ids[sequence.num_prompt_tokens :] if count < ORDER else []
        tokens = tuple(sequence.prediction[count : count + limit])
        if count >= ORDER or not tokens or output != sequence.prediction[:count]:
            return NO_DRAFT
        return Draft(tokens, 1, is_predicted=True)
