"""`POST /abort` ends running requests by the ids that their clients gave them."""

import asyncio
import json

import httpx
import pytest

from server.engine.core.request import FinishReason
from tests.http.fakes import event, put, silent
from tests.http.serving import Server
from tests.waiting import GIVE_UP, reached

pytestmark = pytest.mark.anyio


async def token_then_silence(engine, request, stream):
    put(stream, event(72))
    await silent(engine, request, stream)


@pytest.fixture
async def server(make_app, engine):
    engine.script = token_then_silence
    async with Server(make_app(), "httptools") as server:
        yield server


@pytest.fixture
async def client(server):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture
def start(client, engine):
    """Starts a request that does not end by itself."""

    async def run(request_id, path="/generate"):
        count = len(engine.requests)
        task = asyncio.ensure_future(
            client.post(path, json={"inputs": "x"}, headers={"X-Request-Id": request_id})
        )
        async with asyncio.timeout(GIVE_UP):
            while len(engine.requests) == count:  # noqa: ASYNC110 - no event signals it
                await asyncio.sleep(0.005)
        return task

    return run


async def abort(client, **body):
    response = await client.post("/abort", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_plain_request_ends_with_an_error(client, start, engine):
    running = await start("job")

    assert await abort(client, request_id="job") == {"aborted": ["job"], "not_found": []}

    response = await running
    assert response.status_code == 499
    assert response.json() == {"error": "The request was aborted", "error_type": "aborted"}
    assert engine.aborted == [1]


async def test_a_stream_ends_with_a_last_event_that_says_so(client, start):
    running = await start("job", "/generate_stream")

    assert await abort(client, request_id="job") == {"aborted": ["job"], "not_found": []}

    response = await running
    events = [json.loads(e[5:]) for e in response.text.split("\n\n") if e]
    assert response.status_code == 200
    assert events[0]["token"]["id"] == 72
    assert events[-1] == {"error": "The request was aborted", "error_type": "aborted"}


async def test_several_requests_are_aborted_and_unknown_ids_are_reported(client, start, engine):
    first, second, other = [await start(i) for i in ("a", "b", "c")]

    reply = await abort(client, request_ids=["b", "nobody", "a"])

    assert reply == {"aborted": ["a", "b"], "not_found": ["nobody"]}
    assert {(await task).status_code for task in (first, second)} == {499}
    assert not other.done()
    await abort(client, all=True)
    await other


async def test_all_requests_with_one_id_are_aborted(client, start, engine):
    tasks = [await start("same") for _ in range(3)]

    assert await abort(client, request_id="same") == {"aborted": ["same"], "not_found": []}
    assert {(await task).status_code for task in tasks} == {499}


async def test_all_aborts_requests_whose_clients_gave_no_id(client, start):
    tasks = [await start(""), await start("b")]

    reply = await abort(client, all=True)

    assert len(reply["aborted"]) == 2
    assert "b" in reply["aborted"]
    assert reply["not_found"] == []
    assert {(await task).status_code for task in tasks} == {499}


async def test_a_generated_id_can_be_aborted_too(client, server, engine):
    reader, writer = await server.post("/generate_stream")
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    given = head.split("x-request-id: ")[1].split("\r\n")[0]

    assert (await abort(client, request_id=given))["aborted"] == [given]

    await reader.readuntil(b'"error_type":"aborted"}\n\n')
    writer.close()


async def test_a_finished_request_is_not_found(client, start):
    running = await start("job")
    await abort(client, request_id="job")
    await running

    assert await abort(client, request_id="job") == {"aborted": [], "not_found": ["job"]}
    assert await abort(client, all=True) == {"aborted": [], "not_found": []}


async def test_an_aborted_request_is_counted_as_aborted(client, start):
    running = await start("job")
    await abort(client, request_id="job")
    await running

    text = (await client.get("/metrics")).text
    assert 'tessera_requests_total{endpoint="generate",outcome="abort"} 1.0' in text
    assert "tessera_requests_in_flight 0.0" in text


async def test_one_aborted_sequence_ends_all_of_its_request(client, engine):
    running = asyncio.ensure_future(
        client.post(
            "/generate",
            json={"inputs": "x", "parameters": {"do_sample": True, "best_of": 2}},
            headers={"X-Request-Id": "two"},
        )
    )
    async with asyncio.timeout(GIVE_UP):
        while len(engine.requests) < 2:  # noqa: ASYNC110 - no event signals it
            await asyncio.sleep(0.005)

    await abort(client, request_id="two")

    assert (await running).status_code == 499
    assert sorted(engine.aborted) == [1, 2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "exactly one of"),
        ({"all": False}, "exactly one of"),
        ({"request_id": None}, "exactly one of"),
        ({"request_id": "a", "all": True}, "exactly one of"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"request_ids": []}, "request_ids"),
        ({"request_ids": ["a"] * 1025}, "request_ids"),
        ({"request_ids": [None]}, "request_ids"),
        ({"all": "yes"}, "all"),
        ({"id": "a"}, "id"),
        ([], "array"),
    ],
)
async def test_a_body_that_does_not_say_which_requests_is_refused(client, body, message):
    response = await client.post("/abort", json=body)

    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert message in response.json()["error"]


async def test_an_abort_that_races_with_the_last_token_does_no_harm(client, engine):
    async def finish(_engine, _request, stream):
        put(stream, event(72, FinishReason.LENGTH))

    engine.script = finish
    for i in range(10):
        response, reply = await asyncio.gather(
            client.post("/generate", json={"inputs": "x"}, headers={"X-Request-Id": str(i)}),
            abort(client, request_id=str(i)),
        )
        assert (response.status_code == 499) is (reply["aborted"] == [str(i)])


async def test_a_key_aborts_only_requests_that_were_sent_with_it(make_app, engine):
    engine.script = token_then_silence
    keys = ("first-key", "second-key")
    async with Server(make_app(api_key=keys), "httptools") as server:
        url = f"http://127.0.0.1:{server.port}"
        async with (
            httpx.AsyncClient(base_url=url, headers={"X-Api-Key": keys[0]}) as one,
            httpx.AsyncClient(base_url=url, headers={"X-Api-Key": keys[1]}) as other,
        ):
            body, names = {"inputs": "x"}, {"X-Request-Id": "job"}
            running = asyncio.ensure_future(one.post("/generate", json=body, headers=names))
            await reached(lambda: engine.requests)

            assert await abort(other, request_id="job") == {"aborted": [], "not_found": ["job"]}
            assert await abort(other, all=True) == {"aborted": [], "not_found": []}
            assert await abort(one, all=True) == {"aborted": ["job"], "not_found": []}
            assert (await running).status_code == 499
