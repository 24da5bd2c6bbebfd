"""Token masks of the grammars that this process follows."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

import numpy as np

from model.sampling.grammar import GrammarMatcher, GrammarTokenizer
from model.sampling.mask import HostMasks

log = logging.getLogger("tessera.engine")


class TokenMasker:
    """Follows grammars and computes their masks, each in the slot of its matcher. Not thread-safe.

    Args:
        tokenizer: of the matchers.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self.masks = HostMasks(np.zeros((0, tokenizer.num_words), np.int32))
        self._end_ids = tokenizer.eos_token_ids
        self._free: list[int] = []
        self._num_slots = 0

    def compute(self, matchers: Iterable[GrammarMatcher]) -> None:
        """Compute the masks of the matchers that have none for their state; see `GrammarMatcher.write_mask`."""
        for matcher in matchers:
            if not matcher.is_masked and not matcher.has_failed:
                self._write(matcher)

    def advance(self, rows: Iterable[tuple[GrammarMatcher, int]]) -> None:
        """Accept a token ahead for each of some matchers, with those that are forced after it, and compute the masks.

        Args:
            rows: different matchers without tokens ahead, and the token of each.
        """
        for matcher, token_id in rows:
            try:
                matcher.follow(token_id)
                if not matcher.is_refused:
                    self._write(matcher)
            except Exception:
                log.exception("a grammar failed")
                matcher.fail()

    def _write(self, matcher: GrammarMatcher) -> None:
        if matcher.slot < 0:
            if self._free:
                matcher.slot = self._free.pop()
            else:
                matcher.slot, self._num_slots = self._num_slots, self._num_slots + 1
                self.masks.reserve(self._num_slots)
            weakref.finalize(matcher, self._free.append, matcher.slot)
        words = self.masks.words[matcher.slot]
        matcher.write_mask(words, words.ctypes.data, self._end_ids)
