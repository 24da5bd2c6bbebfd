"""Compiles grammars, and follows them in this process or in others: accepts tokens and computes the next masks."""

from __future__ import annotations

import math
from collections import OrderedDict
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, cast

from model.device.cpus import usable_cpus
from model.device.niceness import give_way
from model.sampling.followed_matcher import MatcherRules
from model.sampling.grammar import WORD_BITS, GrammarTokenizer, compile_matcher
from model.sampling.grammar_process import Setup
from model.sampling.grammar_processes import GrammarProcesses
from model.sampling.mask import HostMasks
from model.sampling.token_masker import TokenMasker
from model.text.tokenizer import Tokenizer
from model.thread_pool import started_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from model.checkpoint.config import ModelConfig
    from model.sampling.followed_matcher import FollowedMatcher
    from model.sampling.grammar import GrammarMatcher
    from model.sampling.parameters import SamplingParams
    from server.engine.core.grammar import Matcher

_THREADS: Final = 2
_KEPT: Final = 64
"""Grammars that are kept compiled for requests with the same one."""
_MOST_PROCESSES: Final = 12
_SPARE_CPUS: Final = 2
"""For the engine's thread and the front end."""


class Grammars:
    """Compiles and follows the grammars of a checkpoint. The vocabulary is loaded for the first of them.

    For a GPU they are followed in processes of their own. On a CPU, whose cores compute the model, a step follows few
    of them.

    Args:
        folder: the checkpoint, with its tokenizer.
        config: of the model.
        device: where tokens are sampled.
        num_slots: masks that there is place for on a GPU: at least the sequences of a step.
        num_processes: that follow grammars, 0 for none; None for a number that suits the device.

    Raises:
        ThreadStartError: the system refuses a thread.
    """

    def __init__(
        self,
        folder: str,
        config: ModelConfig,
        device: torch.device,
        num_slots: int = 1,
        num_processes: int | None = None,
    ) -> None:
        self._folder, self._config, self._device = folder, config, device
        self._threads = started_pool(_THREADS, "grammars", give_way)
        self._lock = Lock()
        self._num_slots = num_slots
        if num_processes is None:
            usable = usable_cpus().logical - _SPARE_CPUS
            num_processes = min(_MOST_PROCESSES, max(0, usable)) if device.type == "cuda" else 0
        self._num_processes = num_processes
        self._tokenizer: GrammarTokenizer | None = None
        self._compiled: OrderedDict[str, GrammarMatcher] = OrderedDict()
        self._follower: Any = None
        self._masks: HostMasks | None = None
        self._is_prepared = False

    def compile(self, sampling: SamplingParams) -> Future[Matcher]:
        """Start to compile the grammar of a request.

        Returns:
            A future. It raises a `GrammarError` if the grammar is at fault, and another exception for other reasons.
        """
        assert sampling.grammar is not None
        # A request that ignores the model's end tokens has none.
        ends_from = sampling.min_new_tokens if sampling.eos_token_ids else math.inf
        rules = MatcherRules(ends_from, sampling.max_new_tokens, sampling.skips_forced_tokens)
        if isinstance(self._follower, GrammarProcesses):
            return cast("Future[Matcher]", self._follower.compile(sampling.grammar, rules))
        return self._threads.submit(self._compile, sampling.grammar, rules, sampling.eos_token_ids)

    def prepare(self) -> None:
        """Start the processes, if there are to be any, so that the first request does not wait for them."""
        if self._num_processes and self._follower is None and not self._is_prepared:
            self._is_prepared = True
            self._threads.submit(self._start)

    def compute_masks(self, matchers: Iterable[FollowedMatcher]) -> HostMasks:
        """Compute the masks of matchers that have none; return all masks. Only the engine's thread calls it."""
        masks = self._writable_masks()
        self._follower.compute(matchers)
        return masks

    def advance(
        self,
        rows: Sequence[tuple[FollowedMatcher, int]],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Accept the tokens of a step ahead; see `TokenMasker.advance`. Only the engine's thread calls it.

        Args:
            rows: matchers and tokens.
            meanwhile: work for the time in which other processes follow the grammars.
        """
        self._writable_masks()
        if isinstance(self._follower, GrammarProcesses):
            self._follower.advance(cast("Any", rows), meanwhile)
        else:
            self._follower.advance(rows)

    def _writable_masks(self) -> HostMasks:
        """Return the masks once they may be written."""
        assert self._follower is not None, "there are matchers"
        if self._masks is None:
            self._masks = self._new_masks()
        self._masks.wait()
        return self._masks

    def _new_masks(self) -> HostMasks:
        if isinstance(self._follower, TokenMasker):
            return self._follower.masks
        if self._device.type != "cuda":
            return HostMasks(self._follower.words)
        # Imported here because only a GPU needs it.
        from model.sampling.device_masks import DeviceMasks  # noqa: PLC0415

        return DeviceMasks(self._follower.words, self._device)

    def _compile(self, grammar: str, rules: MatcherRules, end_ids: tuple[int, ...]) -> Matcher:
        if self._num_processes:
            self._start(end_ids)
            return cast("GrammarProcesses", self._follower).compile(grammar, rules).result()
        with self._lock:
            tokenizer = self._load(end_ids)
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                copy = self._compiled[grammar].copy(rules)
                if copy.has_usable_caches:
                    return copy
        compiled = compile_matcher(tokenizer, grammar)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return compiled.copy(rules)

    def _load(self, end_ids: tuple[int, ...]) -> GrammarTokenizer:
        """Return the vocabulary, and follow grammars in this process.

        Args:
            end_ids: those of the first request with a grammar. They are the same in all requests but those that ignore
                them.
        """
        if self._tokenizer is None:
            config = self._config
            self._tokenizer = GrammarTokenizer(
                Tokenizer.from_folder(self._folder),
                config.network.vocab,
                end_ids or config.eos_token_ids,
            )
            self._follower = TokenMasker(self._tokenizer)
        return self._tokenizer

    def _start(self, end_ids: tuple[int, ...] = ()) -> None:
        """Start the processes unless they run; see `_load`."""
        with self._lock:
            if self._follower is None:
                vocab, end_ids = self._config.network.vocab, end_ids or self._config.eos_token_ids
                size = max(vocab, Tokenizer.from_folder(self._folder).vocab_size)
                setup = Setup(self._folder, vocab, end_ids, -(-size // WORD_BITS))
                self._follower = GrammarProcesses(setup, self._num_processes, self._num_slots)
