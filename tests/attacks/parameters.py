"""Attacks by the fields of a request, on the three APIs: each value gets the promised status, and none a 500."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import httpx

from tests.attacks.parameter_cases import (
    ALL_PATHS,
    CASES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    LONG_TEXT_BYTES,
    OPENAI_PATHS,
    REFUSED,
    SERVED,
    Case,
    body_of,
    encode,
    long_texts,
    prompt_body,
    user_message,
)
from tests.attacks.record import Attack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from tests.attacks.record import Target

_SECONDS = 60.0


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
            if case.status != SERVED:
                assert "error" in reply.json(), f"{what} has no error"
                assert len(reply.content) < 4096, f"{what} has a long error"
                assert "Traceback" not in reply.text, f"{what} has a traceback"


async def _context(target: Target) -> None:
    """Prompts at the limit of the context, and prompt and output together."""
    async with httpx.AsyncClient(timeout=_SECONDS, headers=target.headers) as client:
        most = (await client.get(f"{target.url}/info")).json()["max_total_tokens"]

    def of(tokens: int, output: int) -> dict[str, Any]:
        return {"prompt": [7] * tokens, "max_tokens": output}

    await send(
        target,
        [
            Case(COMPLETIONS, of(most - 1, 1), SERVED),
            Case(COMPLETIONS, of(most - 1, 2), 400),
            Case(COMPLETIONS, of(most - 2, 2), SERVED),
            Case(COMPLETIONS, of(most, 1), 400),
            Case(COMPLETIONS, of(most + 1, 1), 400),
            Case(COMPLETIONS, of(1, most), 400),
        ],
    )


async def _long(target: Target) -> None:
    """Texts that are too long for the model, and the tokens of two of them."""
    texts = long_texts()
    for text in texts.values():
        content = {path: encode(prompt_body(path, text)) for path in ALL_PATHS}
        await send(target, [Case(path, content[path], REFUSED[path]) for path in ALL_PATHS])
    for name in ("one character", "combining marks"):
        await _read_tokens(target, encode({"inputs": texts[name]}))


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
        assert reply.status_code == SERVED, f"/tokenize got {reply.status_code}"
        size, last = 0, b""
        async for data in reply.aiter_bytes():
            size, last = size + len(data), data
        assert last.endswith(b"]"), "the tokens are not complete"
        assert size > LONG_TEXT_BYTES // 4, "tokens are missing"


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
            [user_message("a")] * 40_000, [{}], [{"role": "user"}], [{"role": "root", "content": "a"}],
            [user_message(1)], [user_message([[1]])], [{"role": 1, "content": "a"}],
            [user_message([{"type": "text"}])], [None], ["a"],
        ]  # fmt: skip
        cases = [Case(CHAT, {"messages": [user_message([part])]}, 400) for part in parts]
        cases += [
            Case("/chat_tokenize", {"messages": [user_message([part])]}, 422) for part in parts
        ]
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
            body = {"messages": [user_message(content)], "add_generation_prompt": False}
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
        assert reply.status_code == SERVED, f"the id {value[:20]!r} got {reply.status_code}"
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
        assert await asyncio.gather(*running) == [SERVED, SERVED]
    await send(
        target,
        [
            Case("/abort", {"request_id": "x" * 1_000_000}, 422),
            Case("/abort", {"request_ids": ["a"] * 1025}, 422),
            Case("/abort", {"request_id": ""}, 422),
            Case("/abort", {}, 422),
        ],
    )


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
        [Case(path, body_of(path, user="\x1b[31m\r\nforged: line"), 200) for path in OPENAI_PATHS],
    )


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
