"""CORS, the order of the edge's layers, and what they leave to the fast path of streams."""

import pytest

from server.engine.core.request import FinishReason
from server.http.transport import DirectWriter
from tests.http.fakes import say
from tests.http.serving import Server

pytestmark = pytest.mark.anyio

ORIGIN = "https://app.example.com"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def cors(response):
    return {k: v for k, v in response.headers.items() if k.startswith("access-control")}


async def test_without_origins_no_cors_headers_are_sent(client):
    response = await client.get("/info", headers={"Origin": ORIGIN})

    assert response.status_code == 200
    assert cors(response) == {}
    assert (await client.options("/generate", headers=PREFLIGHT)).status_code == 405


async def test_a_preflight_is_answered_without_a_key(open_client):
    client = await open_client(cors_allow_origin=(ORIGIN,), api_key=("key",))

    response = await client.options("/generate", headers=PREFLIGHT)

    assert response.status_code == 200
    headers = cors(response)
    assert headers["access-control-allow-origin"] == ORIGIN
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in headers["access-control-allow-methods"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/nowhere"])
async def test_answers_and_errors_can_be_read_by_an_allowed_origin(open_client, path):
    client = await open_client(cors_allow_origin=(ORIGIN, "https://other.example.com"))

    response = await client.post(path, json={"inputs": "x"}, headers={"Origin": ORIGIN})

    headers = cors(response)
    assert headers["access-control-allow-origin"] == ORIGIN
    assert headers["access-control-expose-headers"] == "*"
    assert "access-control-allow-credentials" not in headers


async def test_a_refusal_for_want_of_a_key_can_be_read_by_an_allowed_origin(open_client):
    client = await open_client(cors_allow_origin=("*",), api_key=("key",))

    response = await client.post("/generate", json={"inputs": "x"}, headers={"Origin": ORIGIN})

    assert response.status_code == 401
    assert cors(response)["access-control-allow-origin"] == "*"


async def test_other_origins_cannot_read_answers(open_client):
    client = await open_client(cors_allow_origin=(ORIGIN,))

    response = await client.get("/info", headers={"Origin": "https://evil.example.com"})

    assert "access-control-allow-origin" not in cors(response)


@pytest.mark.parametrize(
    "limits",
    [{}, {"cors_allow_origin": (ORIGIN,), "api_key": ("key",), "access_log": True}],
    ids=["plain", "all-layers"],
)
async def test_the_frames_of_a_stream_bypass_the_layers(make_app, engine, monkeypatch, limits):
    engine.script = say([72] * 6, FinishReason.LENGTH, wait=0.005)
    written = []
    write = DirectWriter.write

    def record(writer, data):
        written.append(data)
        return write(writer, data)

    monkeypatch.setattr(DirectWriter, "write", record)
    async with Server(make_app(**limits)) as server:
        reader, writer = await server.connect()
        body = b'{"inputs":"x"}'
        writer.write(
            b"POST /generate_stream HTTP/1.1\r\nHost: t\r\n%bX-API-Key: key\r\n"
            b"Content-Length: %d\r\n\r\n%b"
            % (b"Origin: %b\r\n" % ORIGIN.encode() if limits else b"", len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        frames = await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    assert len(written) == 5  # all but the last, which ends the response
    assert frames.count(b"data:") == 6
    assert (ORIGIN.encode() in head) is bool(limits)
