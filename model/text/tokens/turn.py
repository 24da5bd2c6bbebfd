"""Finds out which tokens a chat template writes in the assistant's turns, by rendering small conversations with it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from model.text.rendering.marks import alternatives

_QUESTION: Final = "Zebra"
_ANSWER: Final = "Yak"
_THOUGHT: Final = "Walrus"
_USER: Final[Mapping[str, Any]] = {"role": "user", "content": _QUESTION}
_ASSISTANT: Final[Mapping[str, Any]] = {"role": "assistant", "content": _ANSWER}
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
"""The keys of a message in which templates read what the model thought."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """The tokens of the assistant's turns.

    Attributes:
        end: the text of the token that follows the assistant's text; None if none does.
        inside: texts of tokens that a turn has before the end of its text, such as those that begin it and those
            between a thought and the answer. The model writes them too.
    """

    end: str | None = None
    inside: frozenset[str] = frozenset()


def find_turn(
    render: Callable[[Sequence[Mapping[str, Any]], bool], str], tokens: Iterable[str]
) -> Turn:
    """Return the tokens of the assistant's turns.

    A template may end the last turn in another way than earlier ones; what the model writes is the last one. In gpt-oss
    that is `<|return|>`, since `<|end|>` ends a thought too. Some templates leave the last turn open.

    Args:
        render: returns what the template makes of messages, with or without the beginning of an answer; empty if it
            rejects them.
        tokens: texts of the tokenizer's added tokens.
    """
    pattern = alternatives([it for it in tokens if len(it.strip()) > 1])
    last = render([_USER, _ASSISTANT], False)
    middle = render([_USER, _ASSISTANT, _USER], True)
    end = _first(pattern, last, _ANSWER) or _first(pattern, middle, _ANSWER)
    prompt, closed = (render([_USER], is_prompt) for is_prompt in (True, False))
    inside: set[str] = set()
    if _QUESTION in prompt and _QUESTION in closed:
        begun, ended = (pattern.findall(it.rpartition(_QUESTION)[2]) for it in (prompt, closed))
        # The token right behind the question ends the user's turn, even if it is written only before an answer.
        ends_user = bool(begun) and _first(pattern, prompt, _QUESTION) == begun[0]
        inside.update(begun[max(_shared(begun, ended), ends_user) :])
    thinking = render([_USER, {**_ASSISTANT, **dict.fromkeys(_REASONING, _THOUGHT)}], False)
    _, found, after = thinking.rpartition(_THOUGHT)
    if found and _ANSWER in after:
        inside.update(pattern.findall(after.partition(_ANSWER)[0]))
    return Turn(None if end in inside else end, frozenset(inside))


def _first(pattern: re.Pattern[str], text: str, word: str) -> str | None:
    """Return the token behind the last place of a word, with nothing but white space between."""
    _, found, after = text.rpartition(word)
    token = pattern.match(after.lstrip()) if found else None
    return token[0] if token else None


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
