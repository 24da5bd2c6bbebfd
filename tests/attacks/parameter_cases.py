"""The requests of the attacks by the fields of a request, and the status that each must get."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

LONG_TEXT_BYTES = 1_900_000
_NEVER = 10**9
SERVED, _MALFORMED = 200, 400
_MAX_TOKENS = 2

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
REFUSED = {GENERATE: 422, COMPLETIONS: 400, CHAT: 400}
OPENAI_PATHS = (COMPLETIONS, CHAT)
ALL_PATHS = (GENERATE, COMPLETIONS, CHAT)


class Case(NamedTuple):
    """One request.

    Attributes:
        path: of the route.
        body: JSON, or the bytes to send.
        status: the promised one.
        headers: in addition to the key.
    """

    path: str
    body: Any
    status: int
    headers: Mapping[str, str] = {}


def body_of(path: str, **fields: object) -> dict[str, Any]:
    """Return a small request of an API with further fields: those of `/generate` are parameters."""
    if path == GENERATE:
        return {"inputs": "a", "parameters": {"max_new_tokens": _MAX_TOKENS, **fields}}
    if path == COMPLETIONS:
        return {"prompt": "a", "max_tokens": _MAX_TOKENS, **fields}
    return {"messages": [user_message("a")], "max_tokens": _MAX_TOKENS, **fields}


def prompt_body(path: str, text: str) -> dict[str, Any]:
    """Return a valid body for a path with this prompt or message."""
    body = body_of(path)
    if path == GENERATE:
        return body | {"inputs": text}
    if path == COMPLETIONS:
        return body | {"prompt": text}
    return body | {"messages": [user_message(text)]}


def user_message(content: object) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def _field(
    name: str, values: Iterable[Any], paths: Iterable[str], status: int | None
) -> list[Case]:
    """Return a case for each value and path; `status` None means that the value is refused."""
    return [
        Case(path, body_of(path, **{name: value}), status or REFUSED[path])
        for path in paths
        for value in values
    ]


def _raw(name: str, values: Iterable[str], paths: Iterable[str], status: int) -> list[Case]:
    """Return a case for each path and value, which need not be JSON."""
    return [
        Case(path, json.dumps(body_of(path, **{name: "?"})).replace('"?"', value).encode(), status)
        for path in paths
        for value in values
    ]


_NOT_JSON = ("NaN", "Infinity", "-Infinity", "1e400", "-1e999")
_WRONG_INTEGERS: tuple[Any, ...] = (-1, _NEVER, True, "2", 2.0, [], {})


def _counts() -> list[Case]:
    wrong = (0, *_WRONG_INTEGERS)
    return [
        *_field("n", wrong, OPENAI_PATHS, None),
        *_field("best_of", wrong, (GENERATE, COMPLETIONS), None),
        *_field("n", (None, 1, 2), OPENAI_PATHS, SERVED),
        *_field("best_of", (None, 1), (GENERATE, COMPLETIONS), SERVED),
        *_field("n", (129,), OPENAI_PATHS, None),
    ]


def _lengths() -> list[Case]:
    wrong = (-1, 10**12, True, "2", 2.5)
    return [
        *_field("max_new_tokens", (0, *wrong), (GENERATE,), None),
        *_field("max_tokens", (0, *wrong), OPENAI_PATHS, None),
        *_field("max_completion_tokens", (0, *wrong), (CHAT,), None),
    ]


def _numbers() -> list[Case]:
    names = (
        "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    )  # fmt: skip
    cases = []
    for name in names:
        cases += _raw(name, _NOT_JSON, ALL_PATHS, _MALFORMED)
        cases += _field(name, (10**400, -(10**9), "1", True, [1]), ALL_PATHS, None)
    cases += _raw("temperature", ("-0.0", "0"), ALL_PATHS, SERVED)
    cases += _raw("frequency_penalty", ("-0.0", "1e-320"), ALL_PATHS, SERVED)
    for path in ALL_PATHS:
        cases += _raw("temperature", ("1e-320",), (path,), REFUSED[path])
    return cases


def _top_k() -> list[Case]:
    return [
        *_field("top_k", (-1, 0), OPENAI_PATHS, SERVED),
        *_field("top_k", (_NEVER,), ALL_PATHS, SERVED),
        *_field("top_k", (-1, 0), (GENERATE,), None),
        *_field("top_k", (-2, 2**63, 2**80, 1.5, "1"), ALL_PATHS, None),
    ]


def _logprobs() -> list[Case]:
    return [
        *_field("logprobs", (-1, 21, _NEVER, 2.0, "1"), (COMPLETIONS,), None),
        *_field("top_logprobs", (-1, 21, _NEVER), (CHAT,), None),
        *_field("top_n_tokens", (-1, 6, _NEVER), (GENERATE,), None),
        *_field("logprobs", (0, 20), (COMPLETIONS,), SERVED),
    ]


def _logit_bias() -> list[Case]:
    return [
        *_field("logit_bias", ({"999999999": 1}, {"-1": 1}, {"a": 1}, {"1": 101}), ALL_PATHS, None),
        *_field("logit_bias", ({str(i): 1 for i in range(100_000)},), ALL_PATHS, None),
        *_raw(
            "logit_bias", ['{"1": NaN}', '{"1": Infinity}', '{"1": 1e400}'], ALL_PATHS, _MALFORMED
        ),
        *_field("logit_bias", ({"1": -100}, {}), ALL_PATHS, SERVED),
    ]


def _stop() -> list[Case]:
    return [
        *_field(
            "stop", (["x"] * 10_000, [""], ["x" * 1_000_000], [1], ["\x00"] * 5), ALL_PATHS, None
        ),
        *_field(
            "stop", ([".*+?[(", "\\"], ["\U0001f98a\u0301"], ["\ufffd", "\x00"]), ALL_PATHS, SERVED
        ),
    ]


def _seed() -> list[Case]:
    return [
        *_field("seed", (2**64, -(2**63) - 1, 1.5, "1", True), ALL_PATHS, None),
        *_field("seed", (-1,), (GENERATE,), None),
        *_field("seed", (-1,), OPENAI_PATHS, SERVED),
    ]


def _prompts() -> list[Case]:
    lists: tuple[Any, ...] = (
        [], [[]], [""], ["a"] * 100_000, [[1]] * 100_000, [-1], [_NEVER], [2**63], [2**64], [1.0], [[[1]]], [True],
        ["a", 1], [1, "a"], {}, 1, None,
    )  # fmt: skip
    return [
        *_field("prompt", ("", *lists), (COMPLETIONS,), None),
        *[Case(GENERATE, {"inputs": value}, 422) for value in ("", *lists)],
        *_field("messages", ("", [], [[]], {}, None, "a"), (CHAT,), None),
        *_field("prompt", (["a", "b"], [1, 2], [[1], [2]]), (COMPLETIONS,), SERVED),
    ]


def long_texts() -> dict[str, str]:
    """Return texts of 1.9 MB that are bad cases of a tokenizer."""
    return {
        "one character": "a" * LONG_TEXT_BYTES,
        "a few words": "a a a " * (LONG_TEXT_BYTES // 6),
        "white space": " \n\t" * (LONG_TEXT_BYTES // 5),  # JSON escapes two of the three
        "combining marks": "e" + "\u0301" * (LONG_TEXT_BYTES // 2),
        "hieroglyphs": "\U00013000" * (LONG_TEXT_BYTES // 4),
        "digits": "1234567890" * (LONG_TEXT_BYTES // 10),
        "punctuation": "!?.," * (LONG_TEXT_BYTES // 4),
    }


def encode(body: object) -> bytes:
    """Return JSON in UTF-8, without escapes of other characters than JSON requires."""
    return json.dumps(body, ensure_ascii=False).encode()


def _encodings() -> list[Case]:
    texts = (b'"\\ud800"', b'"\\udc00x"', b'"\xff"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', b'"a\nb"')
    cases = []
    for path in ALL_PATHS:
        prefix, end = encode(prompt_body(path, "?")).split(b'"?"')
        cases += [Case(path, prefix + text + end, _MALFORMED) for text in texts]
        cases.append(Case(path, b"\xef\xbb\xbf" + encode(body_of(path)), SERVED))
        cases.append(Case(path, encode(prompt_body(path, "\x00\ufeff\U0010ffff")), SERVED))
    return cases


def _templates() -> list[Case]:
    endless = "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}"
    return [
        *_field("chat_template", (endless, "a"), (CHAT,), None),
        *_field("chat_template_kwargs", ({"messages": []}, {"tools": []}, {"range": 1}, "a"), (CHAT,), None),
        *_field("chat_template_kwargs", ({"a": "{{ 7*7 }}"},), (CHAT,), SERVED),
    ]  # fmt: skip


def _grammars() -> list[Case]:
    schemas: list[Any] = [
        {"enum": [f"value {i}" for i in range(60_000)]}, {"type": "nothing"}, {"$ref": "http://127.0.0.1:9/x"},
        _nested(30_000), {"not": {}},
    ]  # fmt: skip
    expressions = [
        "(" * 30_000 + ")" * 30_000,
        "a{1000000000}",
        "(?=a)",
        "[",
        "(a{1,1000}){1,1000}",
    ]
    formats = [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        for schema in schemas
        if not isinstance(schema, bytes)
    ]
    cases = _field("response_format", formats, OPENAI_PATHS, None)
    cases += _field("guided_regex", expressions, OPENAI_PATHS, None)
    cases += _field(
        "grammar", [{"type": "regex", "value": value} for value in expressions], (GENERATE,), None
    )
    cases += _field("guided_regex", ["(a+)+b?"], OPENAI_PATHS, SERVED)
    nested = b'{"type": "array", "items": ' * 30_000 + b"{}" + b"}" * 30_000
    prefix, end = encode(body_of(CHAT, guided_json="?")).split(b'"?"')
    return [*cases, Case(CHAT, prefix + nested + end, _MALFORMED)]


def _nested(depth: int) -> str:
    """Return a schema as text: JSON of this depth is not even decoded."""
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


def _bodies() -> list[Case]:
    cases = []
    for path in ALL_PATHS:
        strict = path == GENERATE
        many = {f"k{i}": 0 for i in range(100_000)}
        cases += [
            Case(path, body_of(path) | {"unknown": 1}, 422 if strict else SERVED),
            Case(path, b'{"a":' * 60_000, _MALFORMED),
            Case(path, b'{"a":' * 100_000, _MALFORMED),
            Case(path, b"[" * 60_000 + b"]" * 60_000, _MALFORMED),
            Case(path, b"[" * 100_000 + b"]" * 100_000, _MALFORMED),
            Case(path, b'{"a": ' + b"9" * 5000 + b"}", _MALFORMED),
            Case(path, b"", _MALFORMED),
            Case(path, b"null", REFUSED[path]),
            Case(path, b"[]", REFUSED[path]),
            Case(path, b"{}", REFUSED[path]),
            Case(path, encode(body_of(path))[:-1] + b', "stream": false, "stream": false}', SERVED),
            Case(path, body_of(path) | many if strict else {}, REFUSED[path]),
        ]
    keys = b"{" + b",".join(b'"%x" :0' % i for i in range(150_000)) + b"}"
    arrays = b'{"inputs": [' + b",".join([b"[0]"] * 450_000) + b"]}"
    for path in ALL_PATHS:
        cases += [Case(path, body, REFUSED[path]) for body in (keys, arrays)]
    return cases


def _streams() -> list[Case]:
    junk: tuple[object, ...] = (1, "a", [], {"include_usage": 1}, {"include_obfuscation": True})
    return [
        *_field("stream", ("true", 1, []), OPENAI_PATHS, None),
        *_field("stream_options", ({"include_usage": True}, 1, "a", []), OPENAI_PATHS, None),
        *[
            Case(path, body_of(path, stream=True, stream_options=options), 400)
            for path in OPENAI_PATHS
            for options in junk
        ],
        *[Case(path, body_of(path, stream=True, n=2), SERVED) for path in OPENAI_PATHS],
        Case(COMPLETIONS, body_of(COMPLETIONS, stream=True, n=1, best_of=2), 400),
        Case("/generate_stream", body_of(GENERATE, best_of=2, do_sample=True), 422),
    ]


def _salts() -> list[Case]:
    odd = ("\x00", "\n", "../..", "\U0010ffff" * 256, "a" * 256, "'; --")
    return [
        *_field("cache_salt", odd, ALL_PATHS, SERVED),
        *_field("cache_salt", ("a" * 257, "a" * 1_000_000, 1, [], {}), ALL_PATHS, None),
    ]


CASES: dict[str, Callable[[], list[Case]]] = {
    "B1": _counts,
    "B2": _lengths,
    "B3": _numbers,
    "B4": _top_k,
    "B5": _logprobs,
    "B6": _logit_bias,
    "B7": _stop,
    "B8": _seed,
    "B9": _prompts,
    "B12": _encodings,
    "B15": _templates,
    "B16": _grammars,
    "B17": _bodies,
    "B18": _streams,
    "B20": _salts,
}
"""The attacks that consist of requests one after the other."""
