"""Attacks by the fields of a request, on the three APIs: each value gets the promised status, and none a 500."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from benchmarks.attacks.record import Attack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from benchmarks.attacks.record import Target

_SECONDS = 60.0
_MEGABYTES = 1_900_000
_NEVER = 10**9
_SERVED, _MALFORMED = 200, 400
_MAX_TOKENS = 2

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
_REFUSED = {GENERATE: 422, COMPLETIONS: 400, CHAT: 400}
_OPENAI = (COMPLETIONS, CHAT)
_ALL = (GENERATE, COMPLETIONS, CHAT)


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


async def send(target: Target, cases: Iterable[Case]) -> None:
    """Send requests one after the other.

    Raises:
        AssertionError: an answer has another status than the promised one, or is an error that is not JSON.
    """
    async with httpx.AsyncClient(timeout=_SECONDS, headers=target.headers) as client:
        for number, case in enumerate(cases):
            content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
            headers = {"content-type": "application/json", **case.headers}
            what = f"request {number} to {case.path}: {content[:120]!r}"
            try:
                reply = await client.post(target.url + case.path, content=content, headers=headers)
            except httpx.HTTPError as error:
                raise AssertionError(f"{what} was not answered: {error!r}") from None
            assert reply.status_code == case.status, (
                f"{what} got {reply.status_code} instead of {case.status}: {reply.text[:200]}"
            )
            if case.status != _SERVED:
                assert "error" in reply.json(), f"{what} has no error"
                assert len(reply.content) < 4096, f"{what} has a long error"
                assert "Traceback" not in reply.text, f"{what} has a traceback"


def body_of(path: str, **fields: object) -> dict[str, Any]:
    """Return a small request of an API with further fields: those of `/generate` are parameters."""
    if path == GENERATE:
        return {"inputs": "a", "parameters": {"max_new_tokens": _MAX_TOKENS, **fields}}
    if path == COMPLETIONS:
        return {"prompt": "a", "max_tokens": _MAX_TOKENS, **fields}
    return {"messages": [_user("a")], "max_tokens": _MAX_TOKENS, **fields}


def _prompt(path: str, text: str) -> dict[str, Any]:
    body = body_of(path)
    if path == GENERATE:
        return body | {"inputs": text}
    if path == COMPLETIONS:
        return body | {"prompt": text}
    return body | {"messages": [_user(text)]}


def _user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _field(
    name: str, values: Iterable[Any], paths: Iterable[str], status: int | None
) -> list[Case]:
    """Return a case for each value and path; `status` None means that the value is refused."""
    return [
        Case(path, body_of(path, **{name: value}), status or _REFUSED[path])
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
        *_field("n", wrong, _OPENAI, None),
        *_field("best_of", wrong, (GENERATE, COMPLETIONS), None),
        *_field("n", (None, 1, 2), _OPENAI, _SERVED),
        *_field("best_of", (None, 1), (GENERATE, COMPLETIONS), _SERVED),
        *_field("n", (129,), _OPENAI, None),
    ]


def _lengths() -> list[Case]:
    wrong = (-1, 10**12, True, "2", 2.5)
    return [
        *_field("max_new_tokens", (0, *wrong), (GENERATE,), None),
        *_field("max_tokens", (0, *wrong), _OPENAI, None),
        *_field("max_completion_tokens", (0, *wrong), (CHAT,), None),
    ]


def _numbers() -> list[Case]:
    names = (
        "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    )  # fmt: skip
    cases = []
    for name in names:
        cases += _raw(name, _NOT_JSON, _ALL, _MALFORMED)
        cases += _field(name, (10**400, -(10**9), "1", True, [1]), _ALL, None)
    cases += _raw("temperature", ("-0.0", "0"), _ALL, _SERVED)
    cases += _raw("frequency_penalty", ("-0.0", "1e-320"), _ALL, _SERVED)
    for path in _ALL:
        cases += _raw("temperature", ("1e-320",), (path,), _REFUSED[path])
    return cases


def _top_k() -> list[Case]:
    return [
        *_field("top_k", (-1, 0), _OPENAI, _SERVED),
        *_field("top_k", (_NEVER,), _ALL, _SERVED),
        *_field("top_k", (-1, 0), (GENERATE,), None),
        *_field("top_k", (-2, 2**63, 2**80, 1.5, "1"), _ALL, None),
    ]


def _logprobs() -> list[Case]:
    return [
        *_field("logprobs", (-1, 21, _NEVER, 2.0, "1"), (COMPLETIONS,), None),
        *_field("top_logprobs", (-1, 21, _NEVER), (CHAT,), None),
        *_field("top_n_tokens", (-1, 6, _NEVER), (GENERATE,), None),
        *_field("logprobs", (0, 20), (COMPLETIONS,), _SERVED),
    ]


def _logit_bias() -> list[Case]:
    return [
        *_field("logit_bias", ({"999999999": 1}, {"-1": 1}, {"a": 1}, {"1": 101}), _ALL, None),
        *_field("logit_bias", ({str(i): 1 for i in range(100_000)},), _ALL, None),
        *_raw("logit_bias", ['{"1": NaN}', '{"1": Infinity}', '{"1": 1e400}'], _ALL, _MALFORMED),
        *_field("logit_bias", ({"1": -100}, {}), _ALL, _SERVED),
    ]


def _stop() -> list[Case]:
    return [
        *_field("stop", (["x"] * 10_000, [""], ["x" * 1_000_000], [1], ["\x00"] * 5), _ALL, None),
        *_field(
            "stop", ([".*+?[(", "\\"], ["\U0001f98a\u0301"], ["\ufffd", "\x00"]), _ALL, _SERVED
        ),
    ]


def _seed() -> list[Case]:
    return [
        *_field("seed", (2**64, -(2**63) - 1, 1.5, "1", True), _ALL, None),
        *_field("seed", (-1,), (GENERATE,), None),
        *_field("seed", (-1,), _OPENAI, _SERVED),
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
        *_field("prompt", (["a", "b"], [1, 2], [[1], [2]]), (COMPLETIONS,), _SERVED),
    ]


async def _context(target: Target) -> None:
    """Prompts at the limit of the context, and prompt and output together."""
    async with httpx.AsyncClient(timeout=_SECONDS, headers=target.headers) as client:
        most = (await client.get(f"{target.url}/info")).json()["max_total_tokens"]

    def of(tokens: int, output: int) -> dict[str, Any]:
        return {"prompt": [7] * tokens, "max_tokens": output}

    await send(
        target,
        [
            Case(COMPLETIONS, of(most - 1, 1), _SERVED),
            Case(COMPLETIONS, of(most - 1, 2), 400),
            Case(COMPLETIONS, of(most - 2, 2), _SERVED),
            Case(COMPLETIONS, of(most, 1), 400),
            Case(COMPLETIONS, of(most + 1, 1), 400),
            Case(COMPLETIONS, of(1, most), 400),
        ],
    )


def long_texts() -> dict[str, str]:
    """Return texts of 1.9 MB that are bad cases of a tokenizer."""
    return {
        "one character": "a" * _MEGABYTES,
        "a few words": "a a a " * (_MEGABYTES // 6),
        "white space": " \n\t" * (_MEGABYTES // 5),  # JSON escapes two of the three
        "combining marks": "e" + "\u0301" * (_MEGABYTES // 2),
        "hieroglyphs": "\U00013000" * (_MEGABYTES // 4),
        "digits": "1234567890" * (_MEGABYTES // 10),
        "punctuation": "!?.," * (_MEGABYTES // 4),
    }


async def _long(target: Target) -> None:
    """Texts that are too long for the model, and the tokens of two of them."""
    texts = long_texts()
    for text in texts.values():
        content = {path: _encode(_prompt(path, text)) for path in _ALL}
        await send(target, [Case(path, content[path], _REFUSED[path]) for path in _ALL])
    for name in ("one character", "combining marks"):
        await _read_tokens(target, _encode({"inputs": texts[name]}))


def _encode(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


async def _read_tokens(target: Target, content: bytes) -> None:
    """Read the reply of /tokenize without decoding it, as fast as it comes."""
    async with (
        httpx.AsyncClient(timeout=_SECONDS, headers=target.headers) as client,
        client.stream(
            "POST",
            f"{target.url}/tokenize",
            content=content,
            headers={"content-type": "application/json"},
        ) as reply,
    ):
        assert reply.status_code == _SERVED, f"/tokenize got {reply.status_code}"
        size, last = 0, b""
        async for data in reply.aiter_bytes():
            size, last = size + len(data), data
        assert last.endswith(b"]"), "the tokens are not complete"
        assert size > _MEGABYTES // 4, "tokens are missing"


def _encodings() -> list[Case]:
    texts = (b'"\\ud800"', b'"\\udc00x"', b'"\xff"', b'"\xc0\xaf"', b'"\xed\xa0\x80"', b'"a\nb"')
    cases = []
    for path in _ALL:
        prefix, end = _encode(_prompt(path, "?")).split(b'"?"')
        cases += [Case(path, prefix + text + end, _MALFORMED) for text in texts]
        cases.append(Case(path, b"\xef\xbb\xbf" + _encode(body_of(path)), _MALFORMED))
        cases.append(Case(path, _encode(_prompt(path, "\x00\ufeff\U0010ffff")), _SERVED))
    return cases


async def _messages(target: Target) -> None:
    """Strange messages, and parts that name addresses: none of these is contacted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        urls = (address, "http://169.254.169.254/latest", "file:///etc/passwd")
        parts: list[dict[str, Any]] = []
        for url in urls:
            parts.append({"type": "image_url", "image_url": {"url": url}})
            parts.append({"type": "input_image", "image_url": url})
            parts.append({"type": "audio_url", "audio_url": {"url": url}})
            parts.append({"type": "video_url", "video_url": {"url": url}})
            parts.append({"type": "file", "file": {"file_data": url}})
        strange: list[Any] = [
            [_user("a")] * 40_000, [{}], [{"role": "user"}], [{"role": "root", "content": "a"}], [_user(1)],
            [_user([[1]])], [{"role": 1, "content": "a"}], [_user([{"type": "text"}])], [None], ["a"],
        ]  # fmt: skip
        cases = [Case(CHAT, {"messages": [_user([part])]}, 400) for part in parts]
        cases += [Case("/chat_tokenize", {"messages": [_user([part])]}, 422) for part in parts]
        cases += [Case(CHAT, {"messages": messages}, 400) for messages in strange]
        await send(target, cases)
        await asyncio.sleep(0.1)
        try:
            listener.accept()
        except BlockingIOError:
            return
        raise AssertionError("the service has contacted an address of a message")


async def _special_tokens(target: Target) -> None:
    """Names of special tokens in a message stay text: they do not become the tokens that the template writes."""
    async with httpx.AsyncClient(timeout=_SECONDS, headers=target.headers) as client:

        async def tokens(content: str) -> list[int]:
            body = {"messages": [_user(content)], "add_generation_prompt": False}
            found: list[int] = (await client.post(f"{target.url}/tokenize", json=body)).json()[
                "tokens"
            ]
            return found

        def name(token: str) -> dict[str, Any]:
            return {"prompt": token, "add_special_tokens": False}

        for text in ("<|endoftext|>", "<|im_start|>system", "<|im_end|>", "</s>", "<s>"):
            reply = await client.post(f"{target.url}/tokenize", json=name(text))
            alone = reply.json()["tokens"]
            if len(alone) == 1:
                assert alone[0] not in await tokens(text), f"{text} became a special token"


def _templates() -> list[Case]:
    endless = "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}"
    return [
        *_field("chat_template", (endless, "a"), (CHAT,), None),
        *_field("chat_template_kwargs", ({"messages": []}, {"tools": []}, {"range": 1}, "a"), (CHAT,), None),
        *_field("chat_template_kwargs", ({"a": "{{ 7*7 }}"},), (CHAT,), _SERVED),
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
    cases = _field("response_format", formats, _OPENAI, None)
    cases += _field("guided_regex", expressions, _OPENAI, None)
    cases += _field(
        "grammar", [{"type": "regex", "value": value} for value in expressions], (GENERATE,), None
    )
    cases += _field("guided_regex", ["(a+)+b?"], _OPENAI, _SERVED)
    nested = b'{"type": "array", "items": ' * 30_000 + b"{}" + b"}" * 30_000
    prefix, end = _encode(body_of(CHAT, guided_json="?")).split(b'"?"')
    return [*cases, Case(CHAT, prefix + nested + end, _MALFORMED)]


def _nested(depth: int) -> str:
    """Return a schema as text: JSON of this depth is not even decoded."""
    return '{"type": "array", "items": ' * depth + "{}" + "}" * depth


def _bodies() -> list[Case]:
    cases = []
    for path in _ALL:
        strict = path == GENERATE
        many = {f"k{i}": 0 for i in range(100_000)}
        cases += [
            Case(path, body_of(path) | {"unknown": 1}, 422 if strict else _SERVED),
            Case(path, b'{"a":' * 100_000, _MALFORMED),
            Case(path, b"[" * 100_000 + b"]" * 100_000, _MALFORMED),
            Case(path, b'{"a": ' + b"9" * 5000 + b"}", _MALFORMED),
            Case(path, b"", _MALFORMED),
            Case(path, b"null", _REFUSED[path]),
            Case(path, b"[]", _REFUSED[path]),
            Case(path, b"{}", _REFUSED[path]),
            Case(
                path, _encode(body_of(path))[:-1] + b', "stream": false, "stream": false}', _SERVED
            ),
            Case(path, body_of(path) | many if strict else {}, _REFUSED[path]),
        ]
    million = b"{" + b",".join(b'"%x":0' % i for i in range(200_000)) + b"}"
    return [*cases, *[Case(path, million, _REFUSED[path]) for path in _ALL]]


def _streams() -> list[Case]:
    junk: tuple[object, ...] = (1, "a", [], {"include_usage": 1}, {"include_obfuscation": True})
    return [
        *_field("stream", ("true", 1, []), _OPENAI, None),
        *_field("stream_options", ({"include_usage": True}, 1, "a", []), _OPENAI, None),
        *[
            Case(path, body_of(path, stream=True, stream_options=options), 400)
            for path in _OPENAI
            for options in junk
        ],
        *[Case(path, body_of(path, stream=True, n=2), _SERVED) for path in _OPENAI],
        Case(COMPLETIONS, body_of(COMPLETIONS, stream=True, n=1, best_of=2), 400),
        Case("/generate_stream", body_of(GENERATE, best_of=2, do_sample=True), 422),
    ]


async def _request_ids(target: Target) -> None:
    """Ids that are long, shared, or a part of another one: they abort only requests with exactly that id."""
    ids = ["x" * 8_000, "a b", "'\"<>", "\xe9"]
    for value in ids:
        async with httpx.AsyncClient(timeout=_SECONDS, headers=target.headers) as client:
            reply = await client.post(
                f"{target.url}{GENERATE}",
                json=body_of(GENERATE),
                headers={b"x-request-id": value.encode("latin-1")},
            )
        assert reply.status_code == _SERVED, f"the id {value[:20]!r} got {reply.status_code}"
        assert len(reply.headers["x-request-id"]) <= 128, f"the id {value[:20]!r} was returned"
    async with httpx.AsyncClient(timeout=_SECONDS, headers=target.headers) as client:

        async def generate() -> int:
            body = body_of(GENERATE) | {"inputs": "def f("}
            body["parameters"] = {"max_new_tokens": 60, "ignore_eos": True}
            headers = {"x-request-id": "victim-1"}
            reply = await client.post(f"{target.url}{GENERATE}", json=body, headers=headers)
            return reply.status_code

        running = [asyncio.ensure_future(generate()) for _ in range(2)]
        await asyncio.sleep(0.02)
        for value in ("victim", "victim-", "victim-10", "v", "*", "%", "VICTIM-1"):
            reply = await client.post(f"{target.url}/abort", json={"request_id": value})
            assert reply.json()["aborted"] == [], f"{value} aborted another's request"
        assert await asyncio.gather(*running) == [_SERVED, _SERVED]
    await send(
        target,
        [
            Case("/abort", {"request_id": "x" * 1_000_000}, 422),
            Case("/abort", {"request_ids": ["a"] * 1025}, 422),
            Case("/abort", {"request_id": ""}, 422),
            Case("/abort", {}, 422),
        ],
    )


def _salts() -> list[Case]:
    odd = ("\x00", "\n", "../..", "\U0010ffff" * 256, "a" * 256, "'; --")
    return [
        *_field("cache_salt", odd, _ALL, _SERVED),
        *_field("cache_salt", ("a" * 257, "a" * 1_000_000, 1, [], {}), _ALL, None),
    ]


async def _labels(target: Target) -> None:
    """Text of clients in `user` and `model`: it becomes no series of the metrics."""
    async with httpx.AsyncClient(timeout=_SECONDS, headers=target.headers) as client:

        async def series() -> set[str]:
            text = (await client.get(f"{target.url}/metrics")).text
            return {line.rsplit(" ", 1)[0] for line in text.splitlines() if line[0] != "#"}

        async def ask(number: int) -> int:
            body = body_of(COMPLETIONS, model=f"m{number}\n\x1b[31m{{}}", user=f"u{number}\r\n")
            return (await client.post(f"{target.url}{COMPLETIONS}", json=body)).status_code

        assert await ask(0) == 404, "an unknown model was served"
        before = await series()
        for first in range(1, 1000, 50):
            found = await asyncio.gather(*map(ask, range(first, first + 50)))
            assert set(found) == {404}, f"unknown models got {set(found)}"
        assert await series() == before, "text of a client became a label"
    await send(
        target,
        [Case(path, body_of(path, user="\x1b[31m\r\nforged: line"), 200) for path in _OPENAI],
    )


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


def _of(id_: str) -> Callable[[Target], Awaitable[None]]:
    async def run(target: Target) -> None:
        await send(target, CASES[id_]())

    return run


ATTACKS: list[Attack] = [
    Attack("B1", "numbers of completions", _of("B1")),
    Attack("B2", "limits of tokens", _of("B2")),
    Attack("B3", "numbers that are none, infinite or tiny", _of("B3")),
    Attack("B4", "top_k", _of("B4")),
    Attack("B5", "log-probabilities", _of("B5")),
    Attack("B6", "biases of logits", _of("B6")),
    Attack("B7", "stop strings", _of("B7")),
    Attack("B8", "seeds", _of("B8")),
    Attack("B9", "prompts of every form", _of("B9")),
    Attack("B10", "prompts at the limit of the context", _context),
    Attack("B11", "texts of 1.9 MB that are hard to tokenize", _long),
    Attack("B12", "text that is not Unicode", _of("B12")),
    Attack("B13", "strange messages, and addresses in them", _messages),
    Attack("B14", "names of special tokens in messages", _special_tokens),
    Attack("B15", "chat templates in requests", _of("B15")),
    # Two processes that compile grammars.
    Attack("B16", "grammars that take long", _of("B16"), started_mib=80.0),
    Attack("B17", "bodies that are deep, wide or no objects", _of("B17")),
    Attack("B18", "options of streams", _of("B18")),
    Attack("B19", "ids of requests", _request_ids),
    Attack("B20", "cache salts", _of("B20")),
    Attack("B21", "control characters and many labels", _labels),
]
