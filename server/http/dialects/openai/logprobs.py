"""Renders log-probabilities as completions and chat report them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from model.text.detokenizer import IncrementalDetokenizer
from server.http.dialects.openai.replies import CompletionLogprobs, TokenLogprob, TopLogprob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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
    r"""Names tokens in log-probabilities.

    The name is the token's text; `bytes:` and its bytes, such as `bytes:\xc3`, if these may be a part of a character;
    `token_id:` and its id if it has no text, or `as_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def at_position(self, token: ScoredToken) -> dict[int, str]:
        """Return the names of a token and of the most likely ones at its position, all different.

        Where the texts of several tokens are equal, the ids name all but the first of them.
        """
        names: dict[int, str] = {}
        taken = set()
        for token_id in dict.fromkeys([token.id, *[token_id for token_id, _ in token.top]]):
            name = self._name(token_id)
            names[token_id] = _name_by_id(token_id) if name in taken else name
            taken.add(name)
        return names

    def _name(self, token_id: int) -> str:
        piece = b"" if self._as_ids else self._tokenizer.token_piece(token_id)
        if not piece:
            return _name_by_id(token_id)
        if isinstance(piece, str):
            return piece
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

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


class TextOffsets:
    """Finds where the generated tokens of one completion begin, in characters of its text.

    Tokens that share a character begin where it does. Text after a stop string counts too.

    Args:
        tokenizer: the model's tokenizer.
        prompt_ids: tokens of the prompt.
        skip_special_tokens: whether special tokens add no text.
        begin: characters before the first generated token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        begin: int,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self._place = begin

    def push(self, token_id: int) -> int:
        """Return where the next token begins."""
        place = self._place
        self._place += len(self._detokenizer.push(token_id))
        return place


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Return where the tokens of a prompt begin, in characters of its text.

    Args:
        tokenizer: the model's tokenizer.
        token_ids: tokens of the prompt.
        text: its text. Special tokens that are not in it, such as a BOS token, have no characters.
    """
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    offsets, place = [], 0
    for token_id in token_ids:
        offsets.append(min(place, len(text)))
        added = detokenizer.push(token_id)
        if not tokenizer.is_special(token_id) or text.startswith(added, place):
            place += len(added)
    return offsets


def completion_logprobs(
    tokens: Sequence[ScoredToken], names: TokenNames, offsets: list[int]
) -> CompletionLogprobs:
    """Render the log-probabilities of a completion.

    Args:
        tokens: the tokens.
        names: names them.
        offsets: where each of them begins.
    """
    rendered = CompletionLogprobs(
        tokens=[], token_logprobs=[], top_logprobs=[], text_offset=offsets
    )
    for token in tokens:
        named = names.at_position(token)
        rendered.tokens.append(named[token.id])
        if token.logprob is None:
            rendered.token_logprobs.append(None)
            rendered.top_logprobs.append(None)
            continue
        logprob = _finite(token.logprob)
        top = {named[token_id]: _finite(value) for token_id, value in token.top}
        top.setdefault(named[token.id], logprob)
        rendered.token_logprobs.append(logprob)
        rendered.top_logprobs.append(top)
    return rendered


def chat_logprobs(tokens: Iterable[ScoredToken], names: TokenNames) -> list[TokenLogprob]:
    """Render the log-probabilities of a message."""
    rendered = []
    for token in tokens:
        named = names.at_position(token)
        top = [
            TopLogprob(named[token_id], _finite(logprob), names.bytes(token_id))
            for token_id, logprob in token.top
        ]
        rendered.append(
            TokenLogprob(
                token=named[token.id],
                logprob=_finite(token.logprob),
                bytes=names.bytes(token.id),
                top_logprobs=top,
            )
        )
    return rendered


def _name_by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _finite(logprob: float | None) -> float:
    """Round to the 9 digits that float32 has; replace what is not finite, or not known."""
    if logprob is None or not logprob > _LOWEST:
        return _LOWEST
    return float(f"{logprob:.9g}")
