"""A completion: one sequence that the engine generates for a prompt, as tokens and as text.

The records do not depend on a wire format; dialects render them. The engine ends a sequence at stop tokens and limits;
this module ends it at stop strings.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from model.text.detokenizer import IncrementalDetokenizer
from model.text.stop import StopChecker, StopMatch
from server.engine.core.request import FinishReason, TokenEvent
from server.errors import (
    AbortedError,
    DeadlineExceededError,
    GenerationError,
    IncompleteGenerationError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from model.sampling.parameters import SamplingParams
    from model.text.tokenizer import Tokenizer
    from server.engine.link.front_end.request_stream import RequestStream
    from server.http.metrics.records import TokenClock

_FAILURES = frozenset({FinishReason.ERROR, FinishReason.ABORT})


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token.

    Attributes:
        id: token id in the model's vocabulary.
        text: what the token adds to the completion's text. Empty for special tokens, for tokens that end within a
            character, and for tokens whose text is held back because it may begin a stop string.
        logprob: natural logarithm of the token's probability; None if not requested.
        special: whether the token is not part of the text.
        top_tokens: (token id, log-probability) of the most likely tokens at this position, most likely first.
    """

    id: int
    text: str
    logprob: float | None
    special: bool
    top_tokens: tuple[tuple[int, float], ...]


class Prompt(NamedTuple):
    """A prompt and its sampling parameters.

    Attributes:
        token_ids: at least one token; all are in the vocabulary.
        sampling: the parameters of all its completions.
    """

    token_ids: list[int]
    sampling: SamplingParams


class StopStrings(NamedTuple):
    """Strings that end a completion.

    Attributes:
        strings: none of them empty.
        included: whether the stop string, or the token that ended the completion, stays at the end of the text.
            Otherwise it is cut off, and text that may be the beginning of a stop string is held back.
        engine_first: whether the engine's finish reason stands if the same token completes a stop string. The text
            ends at the stop string in either case.
    """

    strings: Sequence[str]
    included: bool
    engine_first: bool = False


class Completion:
    """One generated sequence; created and read on the event loop.

    `text` is the concatenation of the texts of all tokens. A token that ends within a character adds no text, and the
    token that completes the character adds all of it. Text after a stop string is dropped.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt to continue. Its last tokens affect how the first generated token is decoded.
        stream: the engine's events.
        sampling: its sampling parameters.
        stop: strings that end the text; also matched against the names of special tokens.
        skip_special_tokens: whether special tokens add no text.
        keep_events: whether to keep the events.

    Attributes:
        events: those read so far, which may go beyond a stop string; None unless they are kept.
        finish_reason: `EOS`, `STOP`, `LENGTH` or `TIMEOUT`; None until the completion ends.
        stop_reason: the stop string or stop token id that ended it; None if neither did.
        logprob_sum: sum of the log-probabilities of all tokens; set by `finish`.
        tokens: set by `finish` if its `keep_tokens` is true.
        context_free: whether the text of the next token depends only on that token. If this is true both before and
            after an ordinary token is pushed, the token always adds the same text, and `add` may be used for it.
    """

    __slots__ = (
        "_detokenizer", "_keeps_end", "_stop", "_texts", "_tokenizer", "context_free", "events", "finish_reason",
        "logprob_sum", "prompt", "sampling", "stop_reason", "stream", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Prompt,
        stream: RequestStream,
        sampling: SamplingParams,
        stop: StopStrings,
        *,
        skip_special_tokens: bool = True,
        keep_events: bool = False,
    ) -> None:
        self.prompt = prompt
        self.stream = stream
        self.sampling = sampling
        self.events: list[TokenEvent] | None = [] if keep_events else None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.logprob_sum = 0.0
        self.tokens: list[Token] = []
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, prompt_ids=prompt.token_ids
        )
        self._keeps_end = stop.included
        self._stop = _StopFilter(stop) if stop.strings else None
        self._texts: list[str] = []  # one for each token
        self.context_free = self._stop is None and self._detokenizer.at_rest

    @property
    def seed(self) -> int:
        """The sampling seed."""
        return self.sampling.seed

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._texts)

    @property
    def text(self) -> str:
        """The generated text so far."""
        return "".join(self._texts)

    @property
    def after(self) -> str | None:
        """Text of the stop string that follows the text, empty if it is a part of it; None if none ended it."""
        if not isinstance(self.stop_reason, str):
            return None
        return "" if self._keeps_end else self.stop_reason

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens; valid after `finish`."""
        return self.logprob_sum / max(1, self.num_tokens)

    @property
    def prompt_logprobs(self) -> list[float | None]:
        """Log-probability of each prompt token; None for the first one, and for all if they were not requested."""
        logprobs: list[float | None] = [None, *(self.stream.prompt_logprobs or ())]
        return logprobs + [None] * (len(self.prompt.token_ids) - len(logprobs))

    @property
    def prompt_top_tokens(self) -> list[tuple[tuple[int, float], ...]]:
        """The most likely tokens at the position of each prompt token; empty where they were not requested."""
        top = [(), *(tuple(row) for row in self.stream.prompt_top_tokens or ())]
        return top + [()] * (len(self.prompt.token_ids) - len(top))

    def push(self, event: TokenEvent) -> str:
        """Append the next token.

        Returns:
            The text that it adds; see `Token.text`.

        Raises:
            GenerationError: the event ends the sequence before it is complete; its type says why.
        """
        token_id, reason = event.token_id, event.finish_reason
        if token_id is None or (reason is not None and reason in _FAILURES):
            raise _failure(event)
        text = ""
        if reason is None or self._keeps_end or not self._is_end_token(token_id, reason):
            text = self._detokenizer.push(token_id)
        if reason is not None:
            self.finish_reason = reason
            if reason is FinishReason.STOP:
                self.stop_reason = token_id
            text += self._detokenizer.flush()
        stop = self._stop
        if stop is None:
            self.context_free = self._detokenizer.at_rest
        else:
            text = self._filter(stop, token_id, text)
        self._texts.append(text)
        return text

    def describe(self, event: TokenEvent, text: str) -> Token:
        """Return the record of an appended token, from its event and the text that `push` returned."""
        assert event.token_id is not None
        special = self._tokenizer.is_special(event.token_id)
        return Token(event.token_id, text, event.logprob, special, event.top_tokens)

    def add(self, text: str) -> int:
        """Append the next token, whose text is already known; see `context_free`. Returns `num_tokens`."""
        texts = self._texts
        texts.append(text)
        return len(texts)

    async def follow(self, take: Callable[[list[TokenEvent]], bool]) -> None:
        """Pass the events of the stream to `take`; see `RequestStream.follow`."""
        kept = self.events
        if kept is None:
            await self.stream.follow(take)
            return

        def keep(events: list[TokenEvent]) -> bool:
            kept.extend(events)
            return take(events)

        await self.stream.follow(keep)

    async def finish(self, clock: TokenClock, *, keep_tokens: bool) -> None:
        """Read all events.

        Raises:
            GenerationError: the engine reported an error.
            IncompleteGenerationError: the sequence ended before it was complete.
        """

        def take(events: list[TokenEvent]) -> bool:
            for event in events:
                if self.num_tokens and _is_timeout_without_token(event):
                    self._end_at_deadline()
                    return False
                text = self.push(event)
                if keep_tokens:
                    self.tokens.append(self.describe(event, text))
                self.logprob_sum += event.logprob or 0.0
                if self.finish_reason is not None:
                    break
            clock.tokens(len(events), self.stream.delivered)
            return self.finish_reason is None

        await self.follow(take)
        if self.finish_reason is None:
            raise IncompleteGenerationError
        await self.stream.settle()  # the engine does not search for stop strings

    def _end_at_deadline(self) -> None:
        """End with the tokens so far."""
        self.finish_reason = FinishReason.TIMEOUT
        self._texts[-1] += self._detokenizer.flush()
        if self._stop is not None:
            self._texts[-1] += self._stop.release()

    def _is_end_token(self, token_id: int, reason: FinishReason) -> bool:
        """Return whether the last token only ends the text; the last token of a grammar may be text."""
        if reason is FinishReason.EOS:
            return token_id in self.prompt.sampling.eos_token_ids
        return reason is FinishReason.STOP

    def _filter(self, stop: _StopFilter, token_id: int, text: str) -> str:
        special = self._tokenizer.is_special(token_id)
        text = stop.push(self._tokenizer.token_text(token_id) if special else text, text)
        if stop.match is not None:
            if self.num_tokens + 1 < self.prompt.sampling.min_new_tokens:  # with this token
                return text + stop.ignore_match()
            if self.finish_reason is None or not stop.engine_first:
                self.finish_reason, self.stop_reason = FinishReason.STOP, stop.match.stop
        elif self.finish_reason is not None:
            text += stop.release()
        return text


class _StopFilter:
    """Searches a text for stop strings and cuts it off at the first match.

    Attributes:
        included: whether the stop string is kept.
        engine_first: see `StopStrings`.
        match: the stop string that was found; nothing may be pushed after it.
    """

    __slots__ = ("_checker", "_held", "_length", "_strings", "engine_first", "included", "match")

    def __init__(self, stop: StopStrings) -> None:
        self.included = stop.included
        self.engine_first = stop.engine_first
        self.match: StopMatch | None = None
        self._strings = stop.strings
        self._checker = StopChecker(stop.strings)
        self._length = 0  # of the searched text
        # Held-back pieces of text, each with its position in the searched text.
        self._held: collections.deque[tuple[int, str]] = collections.deque()

    def push(self, searched: str, text: str) -> str:
        """Search the next piece.

        Args:
            searched: the piece to search: text, or the name of a special token.
            text: what the piece adds to the completion's text; nothing for the name of a special token.

        Returns:
            Text that can no longer be cut off.
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
        """Continue after a match; return the text that `push` cut off."""
        self.match = None
        self._checker, self._length = StopChecker(self._strings), 0
        return self.release()

    def release(self, end: int | None = None) -> str:
        """Return the held-back text up to position `end` of the searched text; None means all of it."""
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


def _is_timeout_without_token(event: TokenEvent) -> bool:
    return event.token_id is None and event.finish_reason is FinishReason.TIMEOUT


def _failure(event: TokenEvent) -> GenerationError:
    if event.finish_reason is FinishReason.ERROR:
        return GenerationError(event.error or "unknown reason")
    if event.finish_reason is FinishReason.ABORT:
        return AbortedError()
    if event.finish_reason is FinishReason.TIMEOUT:
        return DeadlineExceededError()
    return IncompleteGenerationError()
