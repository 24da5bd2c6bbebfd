"""Tokenizing in threads: long texts leave a thread to short ones, and abandoned work is not run."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.http.text.tokenizing import LONG, TokenizerThreads, run_in_place
from server.http.transport import HTTP11Protocol
from tests.http.serving import Server, read_reply
from tests.waiting import GIVE_UP, reached

pytestmark = pytest.mark.anyio


@pytest.fixture
def hold():
    """Functions that run until they are let go."""
    may_end = threading.Event()
    started = []

    def work():
        started.append(None)
        assert may_end.wait(GIVE_UP)
        return "done"

    work.started, work.may_end = started, may_end
    yield work
    may_end.set()


async def test_a_short_text_does_not_wait_for_long_ones(hold):
    threads = TokenizerThreads(2)
    waiting = [asyncio.ensure_future(threads.run(hold, LONG)) for _ in range(5)]

    async with asyncio.timeout(GIVE_UP):
        assert await threads.run(lambda: "short", LONG - 1) == "short"

    await reached(lambda: len(hold.started) == 1)
    hold.may_end.set()
    assert await asyncio.gather(*waiting) == ["done"] * 5


async def test_work_of_a_caller_that_has_left_is_never_run(hold):
    threads = TokenizerThreads(2)
    kept = asyncio.ensure_future(threads.run(hold, LONG))
    left = [asyncio.ensure_future(threads.run(hold, LONG)) for _ in range(140)]
    await asyncio.sleep(0.01)

    for task in left:
        task.cancel()
    hold.may_end.set()

    assert await kept == "done"
    async with asyncio.timeout(GIVE_UP):
        assert await threads.run(lambda: "next", LONG) == "next"
    assert len(hold.started) == 1


async def test_a_place_is_taken_until_the_function_returns_though_its_caller_has_left(hold):
    pool, places = ThreadPoolExecutor(2), asyncio.Semaphore(1)
    await places.acquire()
    task = asyncio.ensure_future(run_in_place(pool, places.release, hold))
    await reached(lambda: hold.started)

    task.cancel()
    await asyncio.sleep(0.01)

    assert places.locked()
    hold.may_end.set()
    async with asyncio.timeout(GIVE_UP):
        await places.acquire()


@pytest.mark.parametrize("path", ["/generate", "/tokenize"])
async def test_requests_whose_clients_left_are_not_tokenized(
    make_app, engine, tokenizer, monkeypatch, hold, path
):
    tokenized = []

    def encode(_self, text, _add=True):
        tokenized.append(text[0])
        hold()
        return [1, 2, 3]

    monkeypatch.setattr(type(tokenizer), "encode", encode)
    monkeypatch.setattr(type(tokenizer), "encode_with_offsets", encode)
    parameters = {"truncate": 5}
    async with Server(make_app(), HTTP11Protocol) as server:
        writers = []
        for _ in range(20):
            body = {"inputs": "a" * LONG, "parameters": parameters}
            writers.append((await server.post(path, body))[1])
        await reached(lambda: tokenized)
        await asyncio.sleep(0.05)
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.05)
        hold.may_end.set()
        reader, writer = await server.post(
            "/generate", {"inputs": "b" * LONG, "parameters": parameters}
        )

        assert "generated_text" in await asyncio.wait_for(read_reply(reader), GIVE_UP)
        writer.close()

    assert tokenized == ["a", "b"]
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "x" * 1900}),
        ("/generate_stream", {"inputs": "x" * 1900}),
        ("/v1/completions", {"prompt": "x" * 1900}),
        ("/v1/completions", {"prompt": ["a", "x" * 1900]}),
    ],
)
async def test_a_text_that_is_plainly_too_long_is_not_tokenized(
    client, tokenizer, monkeypatch, engine, path, body
):
    encode, lengths = type(tokenizer).encode, []

    def spy(self, text, add=True):
        lengths.append(len(text))
        return encode(self, text, add)

    monkeypatch.setattr(type(tokenizer), "encode", spy)

    response = await client.post(path, json=body)

    assert response.status_code in (400, 422)
    assert "must have at most 127 tokens. Given: at least 190 tokens" in response.text
    assert 1900 not in lengths
    assert engine.requests == []


async def test_any_length_of_text_can_be_tokenized_or_truncated(client):
    parameters = {"truncate": 5}
    long = await client.post("/generate", json={"inputs": "x" * 5000, "parameters": parameters})
    tokens = await client.post("/tokenize", json={"inputs": "x" * 5000})

    assert long.status_code == 200
    assert len(tokens.json()) == 5000


async def test_a_text_waits_for_one_of_each_other_client_however_many_these_have(hold):
    threads = TokenizerThreads(1)
    order = []

    def note(name):
        return lambda: order.append(name)

    first = asyncio.ensure_future(threads.run(hold, 1, "flood"))
    await reached(lambda: len(hold.started) == 1)
    rest = [asyncio.ensure_future(threads.run(note("flood"), LONG, "flood")) for _ in range(5)]
    rest += [asyncio.ensure_future(threads.run(note("flood"), 1, "flood")) for _ in range(5)]
    await asyncio.sleep(0)
    rest.append(asyncio.ensure_future(threads.run(note("other"), 1, "other")))
    await asyncio.sleep(0)
    hold.may_end.set()
    await asyncio.gather(first, *rest)

    assert order.index("other") <= 1
    threads.close()
