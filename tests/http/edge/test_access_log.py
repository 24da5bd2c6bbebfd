"""One line in the log for each request, whatever its end, without text of prompts and answers."""

import asyncio
import logging

import httpx
import pytest

from server.engine.core.request import FinishReason
from server.engine.link.protocol import EngineState
from tests.http.fakes import event, put, say, silent
from tests.http.serving import Server
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio

BODY = {"inputs": "a secret prompt"}


@pytest.fixture
def lines(caplog):
    """Returns the fields of all lines so far."""
    caplog.set_level(logging.DEBUG, "tessera.access")

    def read(level=logging.INFO):
        records = [r for r in caplog.records if r.name == "tessera.access" and r.levelno == level]
        assert not any("secret" in str(record.msg) for record in records)
        return [record.msg.fields() for record in records]

    return read


async def one_line(lines):
    async with asyncio.timeout(GIVE_UP):
        while not lines():  # noqa: ASYNC110 - no event signals that a line was logged
            await asyncio.sleep(0.005)
    (line,) = lines()
    return line


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_line_has_identity_status_tokens_and_times(client, engine, lines, path):
    engine.script = say([72, 105, 33], FinishReason.LENGTH, wait=0.01)

    await client.post(path, json=BODY, headers={"X-Request-Id": "job-1"})

    line = await one_line(lines)
    times = {name: line.pop(name) for name in ("queue_ms", "ttft_ms", "total_ms")}
    assert line == {
        "request_id": "job-1",
        "client": "127.0.0.1",
        "method": "POST",
        "route": path,
        "status": 200,
        "prompt_tokens": 15,
        "cached_tokens": 0,
        "output_tokens": 3,
        "outcome": "length",
    }
    assert times["queue_ms"] == 2.0
    assert 0 < times["ttft_ms"] <= times["total_ms"] - 15


@pytest.mark.parametrize(
    ("body", "status", "outcome"), [({"inputs": 3}, 422, "validation"), (BODY, 503, "unavailable")]
)
async def test_a_refused_request_has_a_line_without_tokens(
    client, engine, lines, body, status, outcome
):
    if status == 503:
        engine.state = EngineState.STARTING

    await client.post("/generate", json=body)

    line = await one_line(lines)
    assert (line["status"], line["outcome"]) == (status, outcome)
    assert "prompt_tokens" not in line


async def test_other_routes_have_a_line_and_probes_one_at_level_debug(client, lines):
    await client.get("/info")
    for probe in ("/health", "/ping", "/metrics"):
        await client.get(probe)

    await asyncio.sleep(0.05)
    assert [line["route"] for line in lines()] == ["/info"]
    assert [line["route"] for line in lines(logging.DEBUG)] == ["/health", "/ping", "/metrics"]


async def test_a_bug_has_a_line_with_status_500(client, engine, lines, monkeypatch):
    def fail(request):
        raise RuntimeError("bug")

    monkeypatch.setattr(engine, "submit", fail)
    await client.post("/generate", json=BODY)

    line = await one_line(lines)
    assert (line["status"], line["outcome"]) == (500, "error")


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_request_whose_client_disconnects_has_status_499(make_app, engine, lines, path):
    async def script(_engine, _request, stream):
        put(stream, event(1))
        await silent(_engine, _request, stream)

    engine.script = script
    async with Server(make_app(), "httptools") as server:
        _, writer = await server.post(path, BODY)
        async with asyncio.timeout(GIVE_UP):
            while not engine.running:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        writer.close()

        line = await one_line(lines)

    assert (line["status"], line["outcome"], line["output_tokens"]) == (499, "abort", 1)


async def test_a_client_that_disconnects_before_its_body_is_complete_has_status_499(
    make_app, lines
):
    async with Server(make_app(), "httptools") as server:
        _, writer = await server.connect()
        writer.write(b"POST /generate HTTP/1.1\r\nHost: t\r\nContent-Length: 50\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

        line = await one_line(lines)

    assert line["status"] == 499


@pytest.mark.parametrize("forged", ["x status=500", 'x" status=500', "\\"])
async def test_an_id_cannot_forge_a_field(client, lines, caplog, forged):
    await client.get("/info", headers={"X-Request-Id": forged})

    await one_line(lines)
    text = caplog.messages[-1]
    escaped = forged.replace("\\", "\\\\").replace('"', '\\"')
    assert text.startswith(f'request_id="{escaped}" client=127.0.0.1 ')


async def test_the_path_of_an_unknown_route_cannot_forge_a_line(client, lines, caplog):
    await client.get("/x%0A12:00:00%20INFO%20forged%E2%80%A8" + "y" * 1000)

    await one_line(lines)
    text = caplog.messages[-1]
    assert '"/x\\n12:00:00 INFO forged\\u2028yyy' in text
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 500


async def test_without_the_access_log_nothing_is_logged(open_client, lines):
    client = await open_client(access_log=False)

    assert (await client.post("/generate", json=BODY)).headers["x-request-id"]
    await asyncio.sleep(0.05)
    assert lines() == []


async def test_requests_at_the_same_time_have_lines_of_their_own(make_app, engine, lines):
    engine.script = say([1, 2], FinishReason.LENGTH, wait=0.01)
    async with Server(make_app(), "httptools") as server:
        url = f"http://127.0.0.1:{server.port}/generate"
        async with httpx.AsyncClient() as client:
            await asyncio.gather(
                *(
                    client.post(
                        url, json={"inputs": "x" * (i + 1)}, headers={"x-request-id": f"{i}"}
                    )
                    for i in range(8)
                )
            )

        await asyncio.sleep(0.1)

    assert {(line["request_id"], line["prompt_tokens"]) for line in lines()} == {
        (str(i), i + 1) for i in range(8)
    }
