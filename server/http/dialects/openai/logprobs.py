"""Renders log-probabilities as completions and chat report them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from server.http.dialects.openai.replies import CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model.text.tokenizer import Tokenizer
    from server.http.reply.completion import Completion, Token

# JSON has no infinity; vLLM sends this instead.
_LOWEST = -9999.0


class ScoredToken(NamedTuple):
    """A token with its log-probability; the first token of a prompt has none."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class TokenNames:
    """Names tokens in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """Return the name of a token."""
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> list[int]:
        """Return the bytes of a token's text, which may be a part of a character."""
        return list(self._tokenizer.token_bytes(token_id))


def generated(tokens: Iterable[Token]) -> list[ScoredToken]:
    """Return generated tokens with their log-probabilities."""
    return [ScoredToken(token.id, token.logprob, token.top_tokens) for token in tokens]


def of_prompt(completion: Completion) -> list[ScoredToken]:
    """Return the prompt's tokens with their log-probabilities; valid after the first event."""
    return [
        ScoredToken(token_id, logprob, top)
        for token_id, logprob, top in zip(
            completion.prompt.token_ids,
            completion.prompt_logprobs,
            completion.prompt_top_tokens,
            strict=True,
        )
    ]


def completion_logprobs(
    tokens: Iterable[ScoredToken], names: TokenNames, offset: int = 0
) -> CompletionLogprobs:
    """Render the log-probabilities of a completion.

    Args:
        tokens: the tokens.
        names: names them.
        offset: where the first token begins.
    """
    rendered = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token in tokens:
        name = names.name(token.id)
        rendered.tokens.append(name)
        rendered.text_offset.append(offset)
        offset += len(name)
        if token.logprob is None:
            rendered.token_logprobs.append(None)
            rendered.top_logprobs.append(None)
            continue
        logprob = _finite(token.logprob)
        top: dict[str, float] = {}
        for token_id, value in token.top:  # the first of several tokens with the same name counts
            top.setdefault(names.name(token_id), _finite(value))
        top.setdefault(name, logprob)
        rendered.token_logprobs.append(logprob)
        rendered.top_logprobs.append(top)
    return rendered


def text_length(logprobs: CompletionLogprobs) -> int:
    """Return where the token after the last one begins."""
    if not logprobs.tokens:
        return 0
    return logprobs.text_offset[-1] + len(logprobs.tokens[-1])


def chat_logprobs(tokens: Iterable[ScoredToken], names: TokenNames) -> list[TokenLogprob]:
    """Render the log-probabilities of a message."""
    return [
        TokenLogprob(
            token=names.name(token.id),
            logprob=_finite(token.logprob),
            bytes=names.bytes(token.id),
            top_logprobs=[
                TopLogprob(names.name(token_id), _finite(logprob), names.bytes(token_id))
                for token_id, logprob in token.top
            ],
        )
        for token in tokens
    ]


def _finite(logprob: float | None) -> float:
    """Round to the 9 digits that float32 has; replace what is not finite, or not known."""
    if logprob is None or not logprob > _LOWEST:
        return _LOWEST
    return float(f"{logprob:.9g}")
