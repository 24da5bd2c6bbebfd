"""Makes random prompts of an exact number of tokens, with a local tokenizer or the server's.

A prompt is words of one token each in random order, so that prompts have no long common prefix. It is tokenized and
corrected until it has the requested length.
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
from server.cli.client.http_client import Client, RequestError

Spans: TypeAlias = list[tuple[int, int]]
"""Index of the first character of each token, and of the one after its last."""
Tokenize: TypeAlias = Callable[[str], Awaitable[Spans]]

_SAMPLE_WORDS = 3000
_LONGEST_WORD = 6
_ATTEMPTS = 8
_AT_ONCE = 16
# One token each in most vocabularies: for servers without a known tokenizer.
_COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city community name"
)


class PromptError(Exception):
    """No prompts can be made."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its length in tokens, including those that the tokenizer adds.

    Attributes:
        text: of the prompt.
        tokens: counted, or approximate without a tokenizer.
        exact: whether the prompt has the requested length.
    """

    text: str
    tokens: int
    exact: bool


class PromptMaker:
    """Makes prompts with a tokenizer. Call `learn` first."""

    def __init__(self, tokenize: Tokenize, generator: Generator) -> None:
        self._tokenize = tokenize
        self._generator = generator
        self._words: list[str] = []

    async def learn(self) -> None:
        """Find words of one token, by tokenizing words of random letters.

        Raises:
            PromptError: there are fewer than two, or the server does not tokenize.
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

        # Each has its own generator, since they finish in any order.
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
            # The first word needs a space before it too: without one it is another token.
            text = " " + " ".join(words)
            missing = length - len(await self._tokenize(text))
            if not missing:
                break
        return Prompt(text, length - missing, exact=not missing)


def _whole_words(text: str, spans: Spans, *, to_their_end: bool) -> list[str]:
    """Return the tokens that begin a word, without the space before it.

    Args:
        text: words, each with a space before it.
        spans: its tokens.
        to_their_end: whether a token must be the whole word.
    """
    words = []
    before = 0
    for start, stop in spans:
        word = text[start:stop]
        # In some tokenizers the space belongs to no token, in others to that of the word.
        begins = word.startswith(" ") or (start == before + 1 and text[before] == " ")
        before = stop
        word = word.removeprefix(" ")
        ends = text[stop : stop + 1] in (" ", "")
        if begins and word.isalpha() and (ends or not to_their_end):
            words.append(word)
    return words


def approximate_prompts(lengths: list[int], generator: Generator) -> list[Prompt]:
    """Make prompts of common English words, one for each requested token."""
    words = _COMMON_WORDS.split()
    return [
        Prompt(" ".join(generator.choice(words, length)), length, exact=False) for length in lengths
    ]


def with_tokenizer(tokenizer: Tokenizer) -> Tokenize:
    """Return a function that tokenizes with a local tokenizer."""

    async def tokenize(text: str) -> Spans:
        return [(span.start, span.stop) for span in tokenizer.encode_with_offsets(text)]

    return tokenize


class _Span(msgspec.Struct):
    start: int
    stop: int


def with_server(client: Client) -> Tokenize:
    """Return a function that tokenizes with POST /tokenize of Tessera or Text Generation Inference."""
    decode = msgspec.json.Decoder(list[_Span]).decode

    async def tokenize(text: str) -> Spans:
        """Raise PromptError where the server does not tokenize."""
        body = msgspec.json.encode({"inputs": text})
        try:
            response = await client.request("POST", "/tokenize", body)
            if response.status != 200:
                raise PromptError(f"POST /tokenize answered {response.status}; give --tokenizer")
            return [(span.start, span.stop) for span in decode(response.body)]
        except (RequestError, msgspec.DecodeError) as error:
            raise PromptError(f"POST /tokenize: {error}; give --tokenizer") from error

    return tokenize
