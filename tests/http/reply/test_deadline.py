"""`timeout_ms` ends a request at every stage, also if the engine does not."""

import asyncio
import threading

import pytest

from server.engine.core.request import FinishReason, TokenEvent
from server.http.reply import deadline
from server.http.text.grammar_compiler import GrammarCompiler
from tests.http.conftest import frames

pytestmark = pytest.mark.anyio

ERROR = "`timeout_ms` passed before the generation was complete"
ROUTES = [
    ("/generate", {"inputs": "hello", "parameters": {"timeout_ms": 30}}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 9, "timeout_ms": 30}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 9, "timeout_ms": 30}),
]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(deadline, "_GRACE_SECONDS", 0.05)


def stopped_after(*token_ids):
    """Return a script of an engine that stops after some tokens."""

    async def script(engine, request, stream):
        for token_id in token_ids:
            stream.push(TokenEvent(token_id=token_id, logprob=-0.5))
        stream.deliver()
        await asyncio.Event().wait()

    return script


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_request_to_a_stopped_engine_ends_at_its_deadline(client, engine, path, body):
    engine.script = stopped_after()

    async with asyncio.timeout(60):
        response = await client.post(path, json=body)

    assert response.status_code == 504
    assert ERROR in response.text
    assert sorted(engine.aborted) == sorted(it.request_id for it in engine.requests)


async def test_a_stream_of_a_stopped_engine_ends_with_an_error_at_its_deadline(generate, engine):
    engine.script = stopped_after(72)

    async with asyncio.timeout(60):
        first, last = frames(await generate("/generate_stream", timeout_ms=30))

    assert first["token"]["text"] == "i"
    assert last["error"] == ERROR


async def test_an_answer_has_the_tokens_that_came_before_the_engine_was_stopped(generate, engine):
    engine.script = stopped_after(72, 105)

    async with asyncio.timeout(60):
        response = await generate(timeout_ms=30, details=True)

    assert response.status_code == 200
    assert response.json()["generated_text"].startswith("i")
    assert response.json()["details"]["finish_reason"] == "timeout"
    assert response.json()["details"]["generated_tokens"] == 2


async def test_a_text_that_a_stop_string_ended_is_complete_although_the_engine_does_not_report(
    generate, engine, monkeypatch
):
    engine.script = stopped_after(72)
    monkeypatch.setattr(engine, "stop_request", lambda _: None)

    async with asyncio.timeout(60):
        response = await generate(timeout_ms=30, details=True, stop=["i"])

    assert response.status_code == 200
    assert response.json()["details"]["finish_reason"] == "stop_sequence"


async def test_the_engine_has_time_to_end_a_request_with_its_next_token(
    generate, engine, monkeypatch
):
    monkeypatch.setattr(deadline, "_GRACE_SECONDS", 60.0)

    async def script(engine, request, stream):
        await asyncio.sleep(0.1)
        stream.push(TokenEvent(token_id=72, finish_reason=FinishReason.TIMEOUT))
        stream.deliver()

    engine.script = script

    response = await generate(timeout_ms=30, details=True)

    assert response.status_code == 200
    assert response.json()["details"]["finish_reason"] == "timeout"


async def test_a_text_that_is_being_tokenized_is_given_up_at_the_deadline(
    open_client, engine, tokenizer, monkeypatch
):
    ended = threading.Event()
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_: ended.wait(60) and [1])
    client = await open_client(inline_characters=1)
    try:
        async with asyncio.timeout(60):
            response = await client.post(
                "/generate", json={"inputs": "hello", "parameters": {"timeout_ms": 30}}
            )
    finally:
        ended.set()

    assert response.status_code == 504
    assert not engine.requests


async def test_a_grammar_that_is_being_compiled_is_given_up_at_the_deadline(
    generate, engine, monkeypatch
):
    async def check(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(GrammarCompiler, "check", check)

    async with asyncio.timeout(60):
        response = await generate(timeout_ms=30, grammar={"type": "regex", "value": "a"})

    assert response.status_code == 504
    assert not engine.requests


async def test_a_request_without_a_deadline_has_no_timer():
    async def work():
        return 7

    assert await deadline.in_time(work(), None) == 7
    assert deadline.expire_later(None, None) is None


async def test_a_timeout_within_the_work_is_not_taken_for_the_deadline():
    async def work():
        raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        await deadline.in_time(work(), 1e12)
