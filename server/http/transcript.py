"""The text of one generated sequence, token by token, and where it ends.

Knows neither HTTP nor the engine's process; the engine ends sequences at tokens, stop strings are
found here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.text.detokenizer import IncrementalDetokenizer
from model.text.stop import StopChecker
from server.engine.core.request import FinishReason
from server.errors import GenerationError, IncompleteGenerationError
from server.http.dialects.tgi.replies import Token
from server.http.dialects.tgi.sse import wire_logprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.text.tokenizer import Tokenizer
    from server.engine.core.request import TokenEvent

WIRE_FINISH_REASONS = {
    FinishReason.EOS: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "length",
}


class Transcript:
    """Turns the token events of one sequence into texts.

    The texts of all tokens that are not special, put together, are the generated text. A token that
    ends in the middle of a character has the text "", and the one that completes it has it whole. A
    stop string stays in the text and is its end: what its last token has after it is cut off.

    Args:
        tokenizer: of the model.
        prompt_ids: tokens that the text continues; a tokenizer may write the first word of a text
            differently from the same word after others.
        stop: strings that end the text; they may also be met in the text of special tokens.
        min_new_tokens: stop strings that are complete before so many tokens do not count.

    Attributes:
        num_tokens: tokens so far.
        finish_reason: as on the wire; None while the sequence goes on.
        plain: whether a token that goes on may be entered with `add`, given its text from another time when this held
            before it and after it.
    """

    __slots__ = (
        "_detokenizer",
        "_min_new_tokens",
        "_seen",
        "_stop",
        "_stop_checker",
        "_texts",
        "_tokenizer",
        "finish_reason",
        "num_tokens",
        "plain",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        min_new_tokens: int,
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt_ids)
        self._stop = stop
        self._stop_checker = StopChecker(stop) if stop else None
        self._min_new_tokens = min_new_tokens
        self._seen = 0
        self._texts: list[str] = []
        self.plain = not stop and self._detokenizer.at_rest

    @property
    def text(self) -> str:
        """The generated text so far."""
        return "".join(self._texts)

    def push(self, event: TokenEvent) -> tuple[str, bool]:
        """Take the next token.

        Returns:
            What the token adds to the text, or the name of a special token, and whether it is one.

        Raises:
            GenerationError: the event says that the engine gave up.
            IncompleteGenerationError: the event ends the sequence for no reason of the request's.
        """
        token_id, reason = event.token_id, event.finish_reason
        if token_id is None or reason is FinishReason.ERROR:
            raise _failure(event)
        self.num_tokens += 1
        text = self._detokenizer.push(token_id)
        special = self._tokenizer.is_special(token_id)
        if reason is not None:
            self.finish_reason = WIRE_FINISH_REASONS[reason]
            text += self._detokenizer.flush()
        shown = self._tokenizer.token_text(token_id) if special else text
        if self._stop_checker is not None and reason is None and shown:
            surplus = self._look_for_stop(shown)
            if surplus and not special:
                shown = text = text[:-surplus]
        self._texts.append(text)
        self.plain = self._stop_checker is None and self._detokenizer.at_rest
        return shown, special

    def add(self, text: str) -> None:
        """Take the next token where its text is known; see `plain`.

        Args:
            text: of a token that is not special.
        """
        self.num_tokens += 1
        self._texts.append(text)

    def _look_for_stop(self, text: str) -> int:
        """How many characters at the end of `text` come after a stop string that it completes."""
        assert self._stop_checker is not None
        self._seen += len(text)
        match = self._stop_checker.push(text)
        if match is None:
            return 0
        if self.num_tokens < self._min_new_tokens:
            self._stop_checker, self._seen = StopChecker(self._stop), 0
            return 0
        self.finish_reason = WIRE_FINISH_REASONS[FinishReason.STOP]
        return self._seen - match.end

    def token(self, event: TokenEvent) -> Token:
        """Take the next token, as `push` does, and describe it."""
        text, special = self.push(event)
        assert event.token_id is not None
        return Token(event.token_id, text, wire_logprob(event.logprob), special)

    def top_tokens(self, event: TokenEvent) -> list[Token]:
        """The alternatives at the event's position, most likely first."""
        return [
            Token(
                token_id,
                self._tokenizer.token_text(token_id),
                wire_logprob(logprob),
                self._tokenizer.is_special(token_id),
            )
            for token_id, logprob in event.top_tokens
        ]


def _failure(event: TokenEvent) -> GenerationError:
    if event.finish_reason is FinishReason.ERROR:
        return GenerationError(event.error or "unknown reason")
    return IncompleteGenerationError()
