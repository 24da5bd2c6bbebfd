"""What the replies and events of all OpenAI routes have in common."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from server.engine.core.request import FinishReason
from server.http.dialects.openai.logprobs import TokenNames
from server.http.dialects.openai.replies import Usage, usage_of

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from server.http.dialects.openai.options import Options
    from server.http.reply.completion import Completion
    from server.http.reply.generation import Generation
    from server.receipts.record import Receipt

_FINISH_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "timeout",
}


class ReplyFormat:
    """Facts of one request that its reply, or each of its events, reports.

    Attributes:
        id: the reply's id.
        created: when it was made, in seconds since 1970.
        plain: whether an event reports nothing but text, unless it is the first or last of its choice.
        names: names tokens.
    """

    def __init__(
        self,
        generation: Generation,
        options: Options,
        tokenizer: Tokenizer,
        id_prefix: str,
        warnings: tuple[str, ...],
    ) -> None:
        self.id = f"{id_prefix}{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.plain = not (options.logprobs.reported or options.token_ids or options.running_usage)
        self.names = TokenNames(tokenizer, as_ids=options.tokens_as_ids)
        self._warnings = warnings
        self.generation = generation
        self.options = options

    def usage(self) -> Usage:
        """Return the usage so far."""
        return usage_of(self.generation)

    def event_usage(self) -> Usage | UnsetType | None:
        """Return the usage in the event of a token; null if an event of its own follows."""
        if self.options.running_usage:
            return self.usage()
        return None if self.options.usage_event else UNSET

    @property
    def warnings(self) -> tuple[str, ...] | UnsetType:
        """The warnings so far; `UNSET` if there are none."""
        return (*self._warnings, *self.generation.warnings) or UNSET

    def event_warnings(self, completion: Completion) -> tuple[str, ...] | UnsetType:
        """Return the warnings in the event of a token: in the last one, unless an event for the usage follows."""
        last = completion.finish_reason is not None and not self.options.usage_event
        return self.warnings if last else UNSET

    def event_receipt(self, completion: Completion) -> Receipt | UnsetType:
        """Return the receipt in the event of a token: in the last one of all, unless an event for the usage follows."""
        last = (
            completion.finish_reason is not None and completion is self.generation.completions[-1]
        )
        if self.options.usage_event or not last:
            return UNSET
        return self.generation.receipt

    def finish_reason(self, completion: Completion) -> str | None:
        """Return why a completion ended; None if it continues."""
        reason = completion.finish_reason
        return None if reason is None else _FINISH_REASONS[reason]
