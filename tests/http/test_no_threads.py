"""A service whose system refuses further threads: what needs none goes on, and the rest is unavailable for a while."""

import threading

import pytest

from model.thread_pool import ThreadStartError
from tests.http.conftest import CONFIG

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def refused(monkeypatch):
    """Let the system refuse every thread from now on."""

    def start(_):
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hello"}),
        ("/generate", {"inputs": "hello " * 20_000, "parameters": {"truncate": 5}}),
        ("/generate", {"inputs": "hello", "parameters": {"stop": ["a", "b"]}}),
        (
            "/generate",
            {"inputs": "x", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}},
        ),
        ("/v1/completions", {"prompt": ["a", "b"], "model": CONFIG.model_id}),
        ("/tokenize", {"inputs": "hello"}),
    ],
    ids=["short", "long", "stop", "grammar", "several", "tokenize"],
)
async def test_requests_need_no_new_thread(client, refused, path, body):
    refused()

    response = await client.post(path, json=body)

    assert response.status_code == 200, response.text


async def test_what_needs_a_thread_is_unavailable_and_available_later(client, refused, monkeypatch):
    refused()
    response = await client.get("/openapi.json")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert (await client.post("/generate", json={"inputs": "hello"})).status_code == 200

    monkeypatch.undo()
    assert (await client.get("/openapi.json")).status_code == 200


async def test_a_service_that_gets_no_threads_does_not_start(make_app, refused):
    refused()

    with pytest.raises(ThreadStartError, match="tokenize"):
        make_app()
