"""Compiles grammars on threads, and computes token masks while the device computes a step."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from model.device.cpus import usable_cpus
from model.sampling.grammar import GrammarMatcher, GrammarTokenizer, TokenMasker, compile_matcher
from model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.checkpoint.config import ModelConfig
    from model.sampling.grammar import PendingMasks
    from server.engine.core.grammar import Matcher

_THREADS: Final = 2
_KEPT: Final = 64
"""Grammars that are kept compiled for requests with the same one."""
_MOST_MASKING: Final = 16
"""Threads that compute masks, at most."""
_COPIES: Final = 8
"""Requests with the same grammar from which on it is compiled once more: masks of copies cannot be computed at once."""


class _Compiled:
    """A compiled grammar and the copies of it that are in use."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self._copies: WeakSet[GrammarMatcher] = WeakSet()

    @property
    def num_copies(self) -> int:
        return len(self._copies)

    def copy(self) -> GrammarMatcher:
        copy = self._matcher.copy()
        self._copies.add(copy)
        return copy


class Grammars:
    """Compiles the grammars of a checkpoint. The vocabulary is loaded for the first of them.

    Args:
        folder: the checkpoint, with its tokenizer.
        config: of the model.
    """

    def __init__(self, folder: str, config: ModelConfig) -> None:
        self._folder, self._config = folder, config
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._lock = Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._masker: TokenMasker | None = None
        self._compiled: OrderedDict[str, list[_Compiled]] = OrderedDict()
        # One core stays free for the engine's thread.
        self._num_masking = max(1, min(_MOST_MASKING, usable_cpus().logical - 1))

    def compile(self, grammar: str) -> Future[Matcher]:
        """Start to compile a serialized grammar. The future raises a `ModelError` if that fails."""
        return self._threads.submit(self._compile, grammar)

    def start_masks(self, rows: Sequence[tuple[GrammarMatcher, bool]]) -> PendingMasks:
        """Start to compute masks; see `TokenMasker.start`. Only the engine's thread calls it."""
        if self._masker is None:
            assert self._tokenizer is not None, "there are matchers, so the vocabulary is loaded"
            self._masker = TokenMasker(self._tokenizer, self._num_masking)
        return self._masker.start(rows)

    def _compile(self, grammar: str) -> Matcher:
        with self._lock:
            tokenizer = self._load()
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                compiled = self._compiled[grammar]
                least = min(compiled, key=lambda one: one.num_copies)
                if least.num_copies < _COPIES or len(compiled) >= self._num_masking:
                    copy = least.copy()
                    if copy.has_usable_caches:
                        return copy
                    compiled.remove(least)
        one = _Compiled(compile_matcher(tokenizer, grammar))
        with self._lock:
            self._compiled.setdefault(grammar, []).append(one)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return one.copy()

    def _load(self) -> GrammarTokenizer:
        if self._tokenizer is None:
            config = self._config
            self._tokenizer = GrammarTokenizer(
                Tokenizer.from_folder(self._folder), config.network.vocab, config.eos_token_ids
            )
        return self._tokenizer
