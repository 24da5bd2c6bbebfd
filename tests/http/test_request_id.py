"""Every response has an `X-Request-Id`: the client's, or a generated one."""

import re

import pytest

from server.engine.core.request import FinishReason
from server.http.request_id import current_request, request_id
from tests.http.fakes import event, put
from tests.http.serving import Server

pytestmark = pytest.mark.anyio

GENERATED = re.compile(r"[0-9a-f]{32}")


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/docs", None, 200),
        ("GET", "/nowhere", None, 404),
        ("PUT", "/generate", None, 405),
        ("POST", "/generate", {"inputs": "x"}, 200),
        ("POST", "/generate", {"inputs": 3}, 422),
        ("POST", "/generate_stream", {"inputs": "x"}, 200),
        ("POST", "/tokenize", {"inputs": "x"}, 200),
    ],
)
async def test_every_response_has_the_client_s_id(client, method, path, body, status):
    response = await client.request(method, path, json=body, headers={"X-Request-Id": "job 7/a"})

    assert response.status_code == status
    assert response.headers.get_list("x-request-id") == ["job 7/a"]


async def test_a_response_to_a_bug_has_the_id(client, engine, monkeypatch):
    def fail(request):
        raise RuntimeError("bug")

    monkeypatch.setattr(engine, "submit", fail)
    response = await client.post("/generate", json={"inputs": "x"}, headers={"x-request-id": "7"})

    assert response.status_code == 500
    assert response.headers["x-request-id"] == "7"


async def test_a_request_without_an_id_gets_one_of_its_own(client):
    ids = {(await client.get("/health")).headers["x-request-id"] for _ in range(5)}

    assert len(ids) == 5
    assert all(GENERATED.fullmatch(i) for i in ids)


@pytest.mark.parametrize("given", ["", "x" * 129, "é", "a\tb"])
async def test_an_id_that_is_too_long_or_not_printable_ascii_is_replaced(client, given):
    response = await client.get("/health", headers={"X-Request-Id": given.encode("latin-1")})

    assert GENERATED.fullmatch(response.headers["x-request-id"])


async def test_an_id_of_128_characters_is_kept(client):
    response = await client.get("/health", headers={"X-Request-Id": "x" * 128})

    assert response.headers["x-request-id"] == "x" * 128


async def test_the_engine_gets_the_id_with_each_sequence(generate, engine, client):
    body = {"inputs": "x", "parameters": {"do_sample": True, "best_of": 2}}
    await client.post("/generate", json=body, headers={"X-Request-Id": "both"})

    assert [request.external_id for request in engine.requests] == ["both", "both"]


async def test_the_id_is_known_in_the_scope_and_in_the_task_of_the_request(make_app):
    app, seen = make_app(), []
    scope = {
        "type": "http", "method": "GET", "path": "/health", "headers": [(b"x-request-id", b"5")],
        "query_string": b"", "root_path": "", "client": None,
    }  # fmt: skip

    async def send(message):
        seen.append((request_id(scope), current_request().id))

    await app(scope, None, send)

    assert set(seen) == {("5", "5")}
    assert current_request().id == ""


@pytest.mark.parametrize("implementation", ["httptools", "h11"])
async def test_a_stream_on_a_socket_has_the_id_once(make_app, engine, implementation):
    async def script(_engine, _request, stream):
        put(stream, event(1))
        put(stream, event(2, FinishReason.LENGTH))

    engine.script = script
    async with Server(make_app(), implementation) as server:
        reader, writer = await server.post("/generate_stream")
        text = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        writer.close()

    assert text.count("x-request-id: ") == 1
