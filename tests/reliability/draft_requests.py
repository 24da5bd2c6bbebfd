"""Makes requests of every kind whose replies must not depend on drafts, and compares two replies to a request."""

from __future__ import annotations

import contextlib
import functools
import json
import random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.edits.data import read_edits
from benchmarks.json_schemas import SchemaMaker
from model.checkpoint.config import ModelConfig
from model.errors import GrammarError
from model.hub.resolve import BUNDLED, resolve
from model.sampling.grammar import GrammarTokenizer, check, serialize
from model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tests.reliability.exchange import Reply

_WORDS: Final = (
    "def", "return", "self", "value", "for", "in", "range", "import", "class", "name", "path", "text", "print", "if",
    "not", "None", "with", "open", "as", "file", "assert", "lambda", "yield", "try",
)  # fmt: skip
_QUESTIONS: Final = (
    "Return the sum of two numbers.", "Read a file and return its lines.", "Write a function that sorts words.",
    "Count the words of a text.", "Return whether a number is prime.",
)  # fmt: skip
_STOPS: Final = ("\n\n", "return", "self.", ")", "def ", "xyzzy")
_BANNED: Final = ("self", "return", "import", " the")
_PATTERNS: Final = (
    r"[a-z]{3,12}( [a-z]{3,12}){5}",
    r"(yes|no)(, (yes|no)){4}",
    r"\d{4}-\d{2}-\d{2}( \d{2}:\d{2})?",
)
_MOST_TOKENS: Final = 64
_CHAT: Final = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
_TGI: Final = ("/generate", "/generate_stream")
PATHS: Final = (*_TGI, "/v1/completions", *_CHAT)

_VOLATILE: Final = frozenset(
    {
        "id", "item_id", "response_id", "created", "created_at", "completed_at", "system_fingerprint", "warnings",
        "sequence_number", "index", "output_index", "content_index", "obfuscation", "speculation",
        "prompt_tokens_details", "completion_tokens_details", "input_tokens_details", "output_tokens_details",
        "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens", "tessera",
    }
)  # fmt: skip
"""Fields that differ between two replies to one request."""
_NAMES: Final = frozenset({"type", "object", "event", "role", "status"})
"""Texts that an event has, and not a part of one."""


class Request(NamedTuple):
    """A request.

    Attributes:
        path: of the route.
        body: JSON without `speculation`.
    """

    path: str
    body: dict[str, Any]

    def with_drafts(self, most: int | None) -> Request:
        """Return the request with drafts of at most so many tokens: 0 for none, None for the service's setting."""
        wanted: dict[str, Any] = {"enabled": most != 0}
        if most:
            wanted["max_tokens"] = most
        if self.path in _TGI:
            parameters = self.body["parameters"] | {"speculation": wanted}
            return Request(self.path, self.body | {"parameters": parameters})
        return Request(self.path, self.body | {"speculation": wanted})


class RequestMaker:
    """Makes random requests with deterministic answers: greedy, or with a seed.

    Args:
        seed: equal seeds make equal requests.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._edits = read_edits()
        self._schemas = SchemaMaker(seed)
        self._prefixes = [self._words(150) for _ in range(4)]

    def make(self) -> Request:
        """Return the next request."""
        rng = self._random
        path = rng.choice(PATHS)
        kind = rng.choice(("edit", "edit", "text", "prefix", "json", "pattern"))
        text = self._text(kind)
        options = self._options(path)
        if path in _TGI:
            return Request(path, {"inputs": text, "parameters": self._tgi(path, kind, options)})
        return Request(path, self._openai(path, kind, text, options))

    def _text(self, kind: str) -> str:
        rng = self._random
        if kind == "edit":
            edit = rng.choice(self._edits)
            size = rng.randint(200, 2000)
            return f"# before\n{edit.text[:size]}\n# after: {edit.instruction}\n{edit.edited[: size // 4]}"
        if kind == "prefix":
            return f"{rng.choice(self._prefixes)} {self._words(rng.randint(1, 10))}"
        if kind == "text":
            return self._words(rng.randint(1, 120))
        return f"A record as {kind}:\n"

    def _words(self, count: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=count))

    def _options(self, path: str) -> dict[str, Any]:
        """Return sampling fields, which have one name in all APIs."""
        rng = self._random
        options: dict[str, Any] = {"temperature": 0}
        if path == "/v1/messages":  # has no seed
            return options | ({"top_k": 5} if rng.random() < 0.3 else {})
        if rng.random() < 0.5:
            options = {"temperature": rng.choice((0.3, 0.8, 1.2)), "seed": rng.randrange(1 << 31)}
            for name, values in (("top_k", (5, 40)), ("top_p", (0.5, 0.9)), ("min_p", (0.05,))):
                if rng.random() < 0.3:
                    options[name] = rng.choice(values)
        for name, number in (
            ("repetition_penalty", 1.3), ("frequency_penalty", 0.5), ("presence_penalty", 0.7),
        ):  # fmt: skip
            if rng.random() < 0.2:
                options[name] = number
        if rng.random() < 0.2:
            options["logit_bias"] = {str(rng.randrange(300, 4000)): rng.choice((-100, -2, 3))}
        if rng.random() < 0.2:
            options["ignore_eos"] = True
        return options

    def _grammar(self, kind: str) -> dict[str, Any] | str:
        if kind == "pattern":
            return self._random.choice(_PATTERNS)
        while True:
            schema = self._schemas.make()
            # Some of them no text follows.
            with contextlib.suppress(GrammarError):
                check(_vocabulary(), serialize("json_schema", schema))
                return schema

    def _limits(self, kind: str, most: str, least: str) -> dict[str, Any]:
        """Return the length, stop strings and banned words, by the API's names."""
        rng = self._random
        limits: dict[str, Any] = {most: rng.choice((1, 7, 24, rng.randint(1, _MOST_TOKENS)))}
        if rng.random() < 0.3:
            limits[least] = rng.randint(1, limits[most])
        if rng.random() < 0.4:
            limits["stop"] = rng.sample(_STOPS, rng.randint(1, 3))
        if rng.random() < 0.2 and kind not in ("json", "pattern"):  # they might leave no token
            limits["bad_words"] = rng.sample(_BANNED, rng.randint(1, 2))
        return limits

    def _tgi(self, path: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        rng = self._random
        parameters = options | self._limits(kind, "max_new_tokens", "min_new_tokens")
        parameters["details"] = rng.random() < 0.7
        if parameters["temperature"]:
            parameters["do_sample"] = True
        if parameters["details"] and rng.random() < 0.5:
            parameters["top_n_tokens"] = rng.randint(1, 5)
        if path == "/generate" and parameters["details"] and rng.random() < 0.2:
            parameters["decoder_input_details"] = True
        if kind in ("json", "pattern"):
            name = "json" if kind == "json" else "regex"
            parameters["grammar"] = {"type": name, "value": self._grammar(kind)}
        return parameters

    def _openai(self, path: str, kind: str, text: str, options: dict[str, Any]) -> dict[str, Any]:
        rng = self._random
        body = options | {"model": "bundled"}
        if path == "/v1/messages":
            body["messages"] = [{"role": "user", "content": f"{rng.choice(_QUESTIONS)}\n{text}"}]
            body["max_tokens"] = rng.randint(1, _MOST_TOKENS)
            body["stream"] = rng.random() < 0.5
            return body | ({"stop_sequences": rng.sample(_STOPS, 2)} if rng.random() < 0.4 else {})
        if path == "/v1/responses":
            body |= {"input": text, "max_output_tokens": rng.randint(16, _MOST_TOKENS)}
            return body | {"stream": rng.random() < 0.5}
        body |= self._limits(kind, "max_tokens", "min_tokens") | {"stream": rng.random() < 0.5}
        if path == "/v1/completions":
            body["prompt"] = text
            body |= {"logprobs": rng.randint(0, 5)} if rng.random() < 0.5 else {}
        else:
            body["messages"] = [{"role": "user", "content": f"{rng.choice(_QUESTIONS)}\n{text}"}]
            body |= {"logprobs": True, "top_logprobs": 3} if rng.random() < 0.5 else {}
        if rng.random() < 0.2:
            body["n"] = rng.randint(2, 3)
        if rng.random() < 0.5:
            body["return_token_ids"] = True
        if kind in ("json", "pattern"):
            name = "json" if kind == "json" else "regex"
            body["structured_outputs"] = {name: self._grammar(kind)}
        return body


@functools.cache
def _vocabulary() -> GrammarTokenizer:
    folder = resolve(BUNDLED)
    config = ModelConfig.from_folder(folder)
    tokenizer = Tokenizer.from_folder(folder)
    return GrammarTokenizer(tokenizer, config.network.vocab, config.eos_token_ids)


def content(reply: Reply) -> dict[str, Any]:
    """Return what a reply says, whatever the numbers of tokens of its events are.

    Returns:
        By place in the JSON, texts joined and other values as a list; `status` has the HTTP status.
    """
    found: dict[str, Any] = {"status": reply.status}
    if "event-stream" in reply.headers.get("content-type", ""):
        for line in reply.body.decode().splitlines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                _collect(json.loads(data), "", found)
    else:
        _collect(json.loads(reply.body or b"null"), "", found)
    return found


def differing_places(one: Reply, other: Reply) -> list[str]:
    """Return the places at which two replies differ, of those that `content` returns."""
    here, there = content(one), content(other)
    return sorted(it for it in {*here, *there} if here.get(it) != there.get(it))


def _collect(value: Any, place: str, found: dict[str, Any]) -> None:
    """Add a value at a place: texts are joined, those of a list and other values listed, names listed once."""
    if isinstance(value, dict):
        if value.get("type") == "ping":
            return
        here = f"{place}[{value['index']}]" if place and "index" in value else place
        for name, entry in value.items():
            spent = name == "usage" and "queue_ms" in (entry or ())
            if name not in _VOLATILE and not spent:
                _collect(entry, f"{here}.{name}", found)
    elif isinstance(value, list):
        for entry in value:
            _collect(entry, f"{place}[]", found)
    elif isinstance(value, str) and place.rpartition(".")[2] in _NAMES:
        names = found.setdefault(place, [])
        names += [] if value in names else [value]
    elif isinstance(value, str) and not place.endswith("[]"):
        found[place] = found.get(place, "") + value
    elif value is not None:
        found.setdefault(place, []).append(value)
