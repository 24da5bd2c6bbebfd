"""Compiles grammars on threads, and follows them: accepts a step's tokens and computes the masks of the next ones."""

from __future__ import annotations

import math
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from model.device.cpus import usable_cpus
from model.sampling.device_masks import DeviceMasks
from model.sampling.grammar import GrammarMatcher, GrammarTokenizer, MatcherRules, compile_matcher
from model.sampling.token_masker import TokenMasker
from model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from model.checkpoint.config import ModelConfig
    from model.sampling.mask import HostMasks
    from model.sampling.parameters import SamplingParams
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

    def copy(self, rules: MatcherRules) -> GrammarMatcher:
        copy = self._matcher.copy(rules)
        self._copies.add(copy)
        return copy


class Grammars:
    """Compiles the grammars of a checkpoint. The vocabulary is loaded for the first of them.

    Args:
        folder: the checkpoint, with its tokenizer.
        config: of the model.
        device: where tokens are sampled.
    """

    def __init__(self, folder: str, config: ModelConfig, device: torch.device) -> None:
        self._folder, self._config, self._device = folder, config, device
        self._threads = ThreadPoolExecutor(_THREADS, "grammars")
        self._lock = Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._masker: TokenMasker | None = None
        self._compiled: OrderedDict[str, list[_Compiled]] = OrderedDict()
        # One core stays free for the engine's thread.
        self._num_masking = max(1, min(_MOST_MASKING, usable_cpus().logical - 1))

    def compile(self, sampling: SamplingParams) -> Future[Matcher]:
        """Start to compile the grammar of a request. The future raises a `ModelError` if that fails."""
        assert sampling.grammar is not None
        # A request that ignores the model's end tokens has none.
        ends_from = sampling.min_new_tokens if sampling.eos_token_ids else math.inf
        rules = MatcherRules(ends_from, sampling.max_new_tokens, sampling.skips_forced_tokens)
        return self._threads.submit(self._compile, sampling.grammar, rules)

    def compute_masks(self, matchers: Iterable[GrammarMatcher]) -> HostMasks:
        """Compute the masks of matchers that have none; return all masks. Only the engine's thread calls it."""
        self._follower.compute(matchers)
        return self._follower.masks

    def advance(self, rows: Sequence[tuple[GrammarMatcher, int]]) -> None:
        """Accept the tokens of a step ahead; see `TokenMasker.advance`. Only the engine's thread calls it."""
        self._follower.advance(rows)

    @property
    def _follower(self) -> TokenMasker:
        if self._masker is None:
            assert self._tokenizer is not None, "there are matchers, so the vocabulary is loaded"
            masks = None
            if self._device.type == "cuda":
                masks = DeviceMasks(self._tokenizer.num_words, self._device)
            self._masker = TokenMasker(self._tokenizer, self._num_masking, masks)
        return self._masker

    def _compile(self, grammar: str, rules: MatcherRules) -> Matcher:
        with self._lock:
            tokenizer = self._load()
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                compiled = self._compiled[grammar]
                least = min(compiled, key=lambda one: one.num_copies)
                if least.num_copies < _COPIES or len(compiled) >= self._num_masking:
                    copy = least.copy(rules)
                    if copy.has_usable_caches:
                        return copy
                    compiled.remove(least)
        one = _Compiled(compile_matcher(tokenizer, grammar))
        with self._lock:
            self._compiled.setdefault(grammar, []).append(one)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return one.copy(rules)

    def _load(self) -> GrammarTokenizer:
        if self._tokenizer is None:
            config = self._config
            self._tokenizer = GrammarTokenizer(
                Tokenizer.from_folder(self._folder), config.network.vocab, config.eos_token_ids
            )
        return self._tokenizer
