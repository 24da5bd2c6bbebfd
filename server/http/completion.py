"""A completion: one sequence that the engine generates after a prompt, as tokens and as text.

The records are the service's own; a dialect renders them. The engine ends a sequence at tokens and limits, this module
ends it at stop strings.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from model.text.detokenizer import IncrementalDetokenizer
from model.text.stop import StopChecker
from server.engine.core.request import FinishReason
from server.errors import GenerationError, IncompleteGenerationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.sampling.parameters import SamplingParams
    from model.text.stop import StopMatch
    from model.text.tokenizer import Tokenizer
    from server.engine.core.request import TokenEvent
    from server.engine.link.request_stream import RequestStream
    from server.http.metrics.records import TokenClock


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token.

    Attributes:
        id: in the model's vocabulary.
        text: what the token adds to the completion's text. Empty for special tokens, for tokens that end within a
            character, and for tokens whose text is held back because it may begin a stop string.
        logprob: natural logarithm of the token's probability; None if not asked for.
        special: whether the token is not part of the text.
        top_tokens: (token id, log-probability) of the most likely tokens at this position, most likely first.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    top_tokens: tuple[tuple[int, float], ...]


class Prompt(NamedTuple):
    """A prompt and how it is continued.

    Attributes:
        token_ids: at least one, each smaller than the vocabulary.
        sampling: the parameters of its completions.
    """

    token_ids: list[int]
    sampling: SamplingParams


class StopStrings(NamedTuple):
    """Strings that end a completion.

    Attributes:
        strings: none of them empty.
        included: whether the stop string stays at the end of the text. Otherwise it is cut off, and text that may be
            the beginning of one is held back.
    """

    strings: Sequence[str]
    included: bool


class Completion:
    """One generated sequence; created and read on the event loop.

    The texts of all tokens, joined, are `text`. A token that ends within a character adds no text, and the token that
    completes the character adds all of it. Text after a stop string is dropped.

    Args:
        tokenizer: of the model.
        prompt: to continue. Its last tokens decide how the first word is written.
        stream: the engine's events.
        seed: of the sampling.
        stop: strings that end the text; also matched against the names of special tokens.

    Attributes:
        num_tokens: tokens so far.
        finish_reason: `EOS`, `STOP` or `LENGTH`; None until the completion ends.
        logprob_sum: of all tokens; set by `finish`.
        tokens: set by `finish`, if they are to be kept.
        context_free: whether the text of the next token depends on that token alone. The text of an ordinary token that
            was pushed with this set before and after is the same each time, and may be passed to `add`.
    """

    __slots__ = (
        "_detokenizer", "_stop", "_texts", "_tokenizer", "context_free", "finish_reason", "logprob_sum", "num_tokens",
        "prompt", "seed", "stream", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        stream: RequestStream,
        seed: int,
        stop: StopStrings,
    ) -> None:
        self.prompt = prompt
        self.stream = stream
        self.seed = seed
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.logprob_sum = 0.0
        self.tokens: list[Token] = []
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt.token_ids)
        self._stop = _StopFilter(stop) if stop.strings else None
        self._texts: list[str] = []
        self.context_free = self._stop is None and self._detokenizer.at_rest

    @property
    def text(self) -> str:
        """The generated text so far."""
        return "".join(self._texts)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens; valid after `finish`."""
        return self.logprob_sum / max(1, self.num_tokens)

    @property
    def prompt_logprobs(self) -> list[float | None]:
        """Log-probability of each prompt token; None for the first one and where they were not asked for."""
        logprobs: list[float | None] = [None, *(self.stream.prompt_logprobs or ())]
        return logprobs + [None] * (len(self.prompt.token_ids) - len(logprobs))

    def push(self, event: TokenEvent) -> str:
        """Append the next token.

        Returns:
            The text that it adds; see `Token.text`.

        Raises:
            GenerationError: the event says that the engine gave up.
            IncompleteGenerationError: the event ends the sequence without a reason that the request gave.
        """
        token_id, reason = event.token_id, event.finish_reason
        if token_id is None or reason is FinishReason.ERROR or reason is FinishReason.ABORT:
            raise _failure(event)
        self.num_tokens += 1
        text = self._detokenizer.push(token_id)
        if reason is not None:
            self.finish_reason = reason
            text += self._detokenizer.flush()
        stop = self._stop
        if stop is None:
            self.context_free = self._detokenizer.at_rest
        elif (
            reason is None or not stop.included
        ):  # else the engine's reason counts, and nothing is cut off
            text = self._filter(stop, token_id, text)
        self._texts.append(text)
        return text

    def describe(self, event: TokenEvent, text: str) -> Token:
        """Make the record of a token that was appended, from its event and the text that `push` returned."""
        assert event.token_id is not None
        special = self._tokenizer.is_special(event.token_id)
        return Token(event.token_id, text, event.logprob, special, event.top_tokens)

    def add(self, text: str) -> None:
        """Append the next token, whose text is known; see `context_free`."""
        self.num_tokens += 1
        self._texts.append(text)

    async def finish(self, clock: TokenClock, *, keep_tokens: bool) -> None:
        """Read all events.

        Args:
            clock: measures the waits between tokens.
            keep_tokens: whether to fill `tokens`.

        Raises:
            GenerationError: the engine gave up.
            IncompleteGenerationError: the sequence ended early.
        """

        def take(events: list[TokenEvent]) -> bool:
            for event in events:
                text = self.push(event)
                if keep_tokens:
                    self.tokens.append(self.describe(event, text))
                self.logprob_sum += event.logprob or 0.0
                if self.finish_reason is not None:
                    break
            clock.tokens(len(events))
            return self.finish_reason is None

        await self.stream.follow(take)
        if self.finish_reason is None:
            raise IncompleteGenerationError
        self.stream.abort()  # the engine does not know of the stop string that ended it

    def _filter(self, stop: _StopFilter, token_id: int, text: str) -> str:
        special = self._tokenizer.is_special(token_id)
        text = stop.push(self._tokenizer.token_text(token_id) if special else text, text)
        if stop.match is not None:
            if self.num_tokens < self.prompt.sampling.min_new_tokens:
                return text + stop.ignore_match()
            self.finish_reason = FinishReason.STOP
        elif self.finish_reason is not None:
            text += stop.release()
        return text


class _StopFilter:
    """Searches a text for stop strings, and cuts it where one is found.

    Attributes:
        included: whether the stop string is kept.
        match: the stop string that was found; nothing may be pushed afterwards.
    """

    __slots__ = ("_checker", "_held", "_length", "_strings", "included", "match")

    def __init__(self, stop: StopStrings) -> None:
        self.included = stop.included
        self.match: StopMatch | None = None
        self._strings = stop.strings
        self._checker = StopChecker(stop.strings)
        self._length = 0  # of the searched text
        # Text that is held back, with its position in the searched text.
        self._held: collections.deque[tuple[int, str]] = collections.deque()

    def push(self, searched: str, text: str) -> str:
        """Search the next piece.

        Args:
            searched: the piece itself, or the name of a special token, which is no part of the text.
            text: the part of it that belongs to the text: all or nothing.

        Returns:
            The text that is certain not to be cut off.
        """
        self.match = match = self._checker.push(searched)
        if match is None and self.included:
            self._length += len(searched)
            return text
        self._held.append((self._length, text))
        self._length += len(searched)
        if match is None:
            return self.release(self._checker.safe_length)
        return self.release(match.end if self.included else match.start)

    def ignore_match(self) -> str:
        """Continue after a match; returns the text that `push` cut off."""
        self.match = None
        self._checker, self._length = StopChecker(self._strings), 0
        return self.release()

    def release(self, end: int | None = None) -> str:
        """Return what is held back of the searched text up to `end`; None takes all."""
        released = []
        while self._held:
            start, text = self._held.popleft()
            if end is not None and start + len(text) > end:
                cut = max(0, end - start)
                self._held.appendleft((start + cut, text[cut:]))
                released.append(text[:cut])
                break
            released.append(text)
        return "".join(released)


def _failure(event: TokenEvent) -> GenerationError:
    if event.finish_reason is FinishReason.ERROR:
        return GenerationError(event.error or "unknown reason")
    return IncompleteGenerationError()
