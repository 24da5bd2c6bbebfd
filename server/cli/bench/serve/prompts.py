"""Random prompts of an exact number of tokens, made with a tokenizer here or with the server's own.

They are words that are one token each, in random order, so that no two prompts begin alike for long. Each prompt is
tokenized and mended until it has the length that was asked for.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from numpy.random import Generator

from model.text.tokenizer import Tokenizer
from server.cli.bench.serve.http_client import Client, RequestError

Spans: TypeAlias = list[tuple[int, int]]
"""First character of each token, and one past its last."""
Tokenize: TypeAlias = Callable[[str], Awaitable[Spans]]

_SAMPLE_WORDS = 3000
_LONGEST_WORD = 6
_ATTEMPTS = 8
_AT_ONCE = 16
# One token each in most vocabularies: for servers whose tokenizer nobody has given us.
_COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city community name"
)


class PromptError(Exception):
    """No prompts can be made; the text says why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its length in tokens, those that the tokenizer adds included.

    Attributes:
        text: to continue.
        tokens: counted, or about so many where nothing can count them.
        exact: whether it has as many as were asked for.
    """

    text: str
    tokens: int
    exact: bool


class PromptMaker:
    """Makes prompts with a tokenizer; `learn` has to come first.

    Args:
        tokenize: finds the tokens of a text.
        generator: source of randomness.
    """

    def __init__(self, tokenize: Tokenize, generator: Generator) -> None:
        self._tokenize = tokenize
        self._generator = generator
        self._words: list[str] = []

    async def learn(self) -> None:
        """Find words that are one token, by tokenizing words of random letters.

        Raises:
            PromptError: there are hardly any, or the server does not tokenize.
        """
        letters = list(string.ascii_lowercase)
        lengths = self._generator.integers(1, _LONGEST_WORD + 1, _SAMPLE_WORDS)
        text = "".join(" " + "".join(self._generator.choice(letters, n)) for n in lengths)
        found = _whole_words(text, await self._tokenize(text), to_their_end=False)
        candidates = " " + " ".join(sorted(set(found)))
        spans = await self._tokenize(candidates)
        self._words = _whole_words(candidates, spans, to_their_end=True)
        if len(self._words) < 2:
            raise PromptError("the tokenizer has no tokens that are words of latin letters")

    async def make(self, lengths: list[int]) -> list[Prompt]:
        """Make a prompt of each length, in tokens."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def finish(length: int, generator: Generator) -> Prompt:
            async with gate:
                return await self._make_one(length, generator)

        # One generator each: they finish in any order.
        return await asyncio.gather(*map(finish, lengths, self._generator.spawn(len(lengths))))

    async def _make_one(self, length: int, generator: Generator) -> Prompt:
        words: list[str] = []
        text, missing = "", length
        for _ in range(_ATTEMPTS):
            if missing > 0:
                chosen = generator.integers(0, len(self._words), missing)
                words += [self._words[i] for i in chosen]
            else:
                del words[max(1, len(words) + missing) :]
            # The first word, too, is the token it is only behind a space.
            text = " " + " ".join(words)
            missing = length - len(await self._tokenize(text))
            if not missing:
                break
        return Prompt(text, length - missing, exact=not missing)


def _whole_words(text: str, spans: Spans, *, to_their_end: bool) -> list[str]:
    """The tokens that stand for the beginning of a word and, maybe, for the space before it.

    Args:
        text: words, each with a space before it.
        spans: its tokens.
        to_their_end: whether they must be the whole word.
    """
    words = []
    before = 0
    for start, stop in spans:
        word = text[start:stop]
        # Some tokenizers count the space as part of no token, others as part of the word's.
        begins = word.startswith(" ") or (start == before + 1 and text[before] == " ")
        before = stop
        word = word.removeprefix(" ")
        ends = text[stop : stop + 1] in (" ", "")
        if begins and word.isalpha() and (ends or not to_their_end):
            words.append(word)
    return words


def approximate_prompts(lengths: list[int], generator: Generator) -> list[Prompt]:
    """Make prompts of common English words, as many as tokens are asked for."""
    words = _COMMON_WORDS.split()
    return [
        Prompt(" ".join(generator.choice(words, length)), length, exact=False) for length in lengths
    ]


def with_tokenizer(tokenizer: Tokenizer) -> Tokenize:
    """Tokenize here."""

    async def tokenize(text: str) -> Spans:
        return [(span.start, span.stop) for span in tokenizer.encode_with_offsets(text)]

    return tokenize


class _Span(msgspec.Struct):
    start: int
    stop: int


def with_server(client: Client) -> Tokenize:
    """Have the server tokenize, by POST /tokenize as Tessera and Text Generation Inference have it."""
    decode = msgspec.json.Decoder(list[_Span]).decode

    async def tokenize(text: str) -> Spans:
        """Raise PromptError where the server does not."""
        body = msgspec.json.encode({"inputs": text})
        try:
            response = await client.request("POST", "/tokenize", body)
            if response.status != 200:
                raise PromptError(f"POST /tokenize answered {response.status}; give --tokenizer")
            return [(span.start, span.stop) for span in decode(response.body)]
        except (RequestError, msgspec.DecodeError) as error:
            raise PromptError(f"POST /tokenize: {error}; give --tokenizer") from error

    return tokenize
