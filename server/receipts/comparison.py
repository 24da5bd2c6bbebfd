"""Compares an output that was computed again with its receipt."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from msgspec import UNSET, UnsetType

from server.engine.core.request import FinishReason
from server.receipts.record import OUTSIDE, REASONS, logprob_digest

if TYPE_CHECKING:
    from server.receipts.record import Logprobs, ReceiptOutput


class LogprobDigests(NamedTuple):
    """Digests of the log-probabilities of an output and of its prompt; UNSET for those that there are not."""

    output: str | UnsetType
    prompt: str | UnsetType


@dataclasses.dataclass(slots=True)
class Computed:
    """An output as it was computed again, so far.

    Attributes:
        token_ids: generated tokens.
        logprobs: of each of them.
        prompt_logprobs: of each token of the prompt but the first; None if they were not asked for.
        digests: of the log-probabilities, where only these are known; None where `logprobs` are.
        finish_reason: why the engine ended it; None if it did not.
        error: why it could not be computed; None if it could.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[Logprobs] | None = None
    digests: LogprobDigests | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None

    def logprob_digests(self, count: int) -> LogprobDigests:
        """Return the digests of its first `count` tokens and of its prompt."""
        if self.digests is not None:
            return self.digests
        return LogprobDigests(
            logprob_digest(self.logprobs[:count]), logprob_digest(self.prompt_logprobs or ())
        )

    def suffices_for(self, output: ReceiptOutput) -> bool:
        """Return whether `compare` needs no further token.

        To find that an output goes on where the receipt has its end, it needs the token after that.
        """
        more = 0 if output.finish_reason in OUTSIDE else 1
        return len(self.token_ids) >= len(output.token_ids) + more


def compare(output: ReceiptOutput, computed: Computed) -> str | None:
    """Compare an output with its receipt.

    A stop string or a deadline ends an output from outside: whatever comes after the receipt's tokens is not compared.
    An end token, a stop token or the limit must end it at the same token again.

    Returns:
        The first difference; None if there is none. Tokens count from 0, as in the receipt's list.
    """
    if (difference := _token_difference(output, computed)) is not None:
        return difference
    if computed.error is not None:
        return f"cannot be computed: {computed.error}"
    if (difference := _end_difference(output, computed)) is not None:
        return difference
    digests = computed.logprob_digests(len(output.token_ids))
    if output.logprobs is not UNSET and output.logprobs != digests.output:
        return "differs in its log-probabilities; its tokens are equal"
    if output.prompt_logprobs is not UNSET and output.prompt_logprobs != digests.prompt:
        return "differs in the log-probabilities of its prompt; its tokens are equal"
    return None


def _token_difference(output: ReceiptOutput, computed: Computed) -> str | None:
    for i, (old, new) in enumerate(zip(output.token_ids, computed.token_ids, strict=False)):
        if old != new:
            return f"differs at token {i}: {new} instead of {old}"
    return None


def _end_difference(output: ReceiptOutput, computed: Computed) -> str | None:
    wanted, found = output.token_ids, computed.token_ids
    count = len(wanted)
    if len(found) < count:
        return f"differs at token {len(found)}: {_end(computed)} instead of {wanted[len(found)]}"
    if output.finish_reason in OUTSIDE:
        return None
    end = f"the end ({output.finish_reason})"
    if len(found) > count:
        return f"differs at token {count}: {found[count]} instead of {end}"
    if _end(computed) != end:
        return f"differs after the last token: {_end(computed)} instead of {end}"
    return None


def _end(computed: Computed) -> str:
    reason = computed.finish_reason
    return f"the end ({'none' if reason is None else REASONS[reason]})"
