"""Token masks of grammars: computes which tokens each sequence may have next, many sequences at once.

A step's tokens go to `TokenMasker.advance`, which accepts them, computes the next masks and follows what is forced. The
threads that do so are the library's own and hold no interpreter lock, so a step waits for the longest share of them
instead of for one sequence after the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from model.sampling.grammar import WORD_BITS, GrammarMatcher, GrammarTokenizer, clear_bits
from model.sampling.mask import HostMasks

Words = npt.NDArray[np.int32]

_PROBED: Final = 64
"""Words of a mask that are counted first. Nearly all masks with more than a few tokens have a few among the first 2,048,
where vocabularies keep single characters, and large masks take long to count.
"""
_slot = attrgetter("slot")


def _caches(matcher: GrammarMatcher) -> int:
    return id(matcher.caches)


def _caches_of_row(row: tuple[GrammarMatcher, int]) -> int:
    return id(row[0].caches)


class TokenMasker:
    """Computes masks, each in the slot of its matcher. Not thread-safe.

    Args:
        tokenizer: of the matchers.
        num_threads: at least 1.
        masks: memory of the masks; by default that of the host.
    """

    def __init__(
        self, tokenizer: GrammarTokenizer, num_threads: int = 1, masks: HostMasks | None = None
    ) -> None:
        self.masks = HostMasks(tokenizer.num_words) if masks is None else masks
        # A single thread of the library would do no more than this one, which would wait to be woken.
        self._executor = LLExecutor(num_threads=num_threads) if num_threads > 1 else None
        self._end_ids = frozenset(tokenizer.eos_token_ids)
        self._most_few = max(1, len(self._end_ids))
        self._free: list[int] = []
        self._num_slots = 0

    def compute(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Compute the masks of the matchers that have none for their state.

        End tokens are allowed where the grammar and `GrammarMatcher.rules` allow them, and where nothing else is. A
        matcher that cannot continue has an `error` afterwards.
        """
        due = [matcher for matcher in matchers if not matcher.is_masked]
        if due:
            due.sort(key=_caches)
            self._compute(due)
            self._note_ends(due, self._few(due))
            self._complete(due)

    def advance(self, rows: Sequence[tuple[GrammarMatcher, int]]) -> None:
        """Accept a token for each of some matchers, then the tokens that are forced after it, and compute the masks.

        The tokens are `GrammarMatcher.ahead` until the owner of the matcher accepts them too. A token is forced where
        no other is allowed, so forced tokens are those that as many steps would sample.

        Args:
            rows: different matchers without tokens ahead, and the token of each.
        """
        following = reached = self._accept(sorted(rows, key=_caches_of_row))
        while following:
            self._compute(following)
            few = self._few(following)
            self._note_ends(following, few)
            for matcher in following:
                matcher.is_followed = matcher.follows_forced
            forced = [
                (following[i], ids[0])
                for i, ids in few
                if len(ids) == 1 and following[i].follows_forced and ids[0] not in self._end_ids
            ]
            following = self._accept(forced) if forced else []
        self._complete(reached)

    def _accept(self, rows: Sequence[tuple[GrammarMatcher, int]]) -> list[GrammarMatcher]:
        """Accept a token for each of some matchers; return those that allowed it."""
        if self._executor is None:
            accepted = [matcher.library.consume_token(token_id) for matcher, token_id in rows]
        else:
            pairs = [(matcher.library, token_id) for matcher, token_id in rows]
            accepted = self._executor.consume_token_par(pairs)
        for (matcher, token_id), allowed in zip(rows, accepted, strict=True):
            matcher.ahead.append(token_id)
            matcher.num_tokens += 1
            if not allowed:
                matcher.is_refused = True
        if all(accepted):
            return [matcher for matcher, _ in rows]
        return [matcher for matcher, _ in rows if not matcher.is_refused]

    def _compute(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Compute masks into the slots. Matchers with the same caches are adjacent.

        The library divides the list into contiguous parts, and locks caches while it computes a mask: so a part rarely
        waits for another one.
        """
        for matcher in matchers:
            if matcher.slot < 0:
                self._assign_slot(matcher)
        self.masks.wait()
        words = self.masks.words
        start, size = words.ctypes.data, words.shape[1] * words.itemsize
        if self._executor is None:
            for matcher in matchers:
                matcher.library.unsafe_compute_mask_ptr(start + matcher.slot * size, size)
            return
        pairs = [(matcher.library, matcher.slot) for matcher in matchers]
        self._executor.unsafe_compute_mask_ptr(pairs, start, size, len(words))

    def _assign_slot(self, matcher: GrammarMatcher) -> None:
        if self._free:
            matcher.slot = self._free.pop()
        else:
            matcher.slot = self._num_slots
            self._num_slots += 1
            self.masks.reserve(self._num_slots)
        weakref.finalize(matcher, self._free.append, matcher.slot)

    def _few(self, matchers: Sequence[GrammarMatcher]) -> list[tuple[int, list[int]]]:
        """Return the index and the allowed ids of each matcher that allows few tokens: one, or as many as end tokens."""
        words, most = self.masks.words, self._most_few
        slots = np.fromiter(map(_slot, matchers), np.int64, len(matchers))
        near = np.flatnonzero(np.count_nonzero(words[slots, :_PROBED], axis=1) <= most)
        if not len(near):
            return []
        masks = words[slots[near]]
        found = []
        for row in np.flatnonzero(np.count_nonzero(masks, axis=1) <= most).tolist():
            ids = _token_ids(masks[row])
            if len(ids) <= most:
                found.append((int(near[row]), ids))
        return found

    def _note_ends(
        self, matchers: Sequence[GrammarMatcher], few: Iterable[tuple[int, list[int]]]
    ) -> None:
        """Note which matchers have ended, or cannot continue: the library then allows the end tokens."""
        for i, ids in few:
            if self._end_ids.issuperset(ids):
                matchers[i].has_stopped = matchers[i].library.is_stopped()

    def _complete(self, matchers: Sequence[GrammarMatcher]) -> None:
        """Clear the bits of end tokens that are not allowed, unless a mask has no other."""
        words = self.masks.words
        slots = []
        for matcher in matchers:
            matcher.is_masked = True
            if matcher.num_tokens < matcher.rules.ends_from:
                slots.append(matcher.slot)
        if not slots:
            return
        found = np.zeros(len(slots), np.bool_)
        for token_id in self._end_ids:
            word, bit = divmod(token_id, WORD_BITS)
            found |= (words[slots, word] >> bit & 1).astype(np.bool_)
        for i in np.flatnonzero(found).tolist():
            kept = words[slots[i]].copy()
            clear_bits(kept, self._end_ids)
            if kept.any():
                words[slots[i]] = kept


def _token_ids(words: Words) -> list[int]:
    """Return the ids of the tokens that a mask allows, which are few."""
    ids = []
    for index in np.flatnonzero(words).tolist():
        bits = int(words[index]) & 0xFFFFFFFF
        while bits:
            ids.append(index * WORD_BITS + (bits & -bits).bit_length() - 1)
            bits &= bits - 1
    return ids
