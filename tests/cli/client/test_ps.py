"""`tessera ps` with a scripted server."""

import json
import socket

from tests.cli import fake_server as fake

MODELS = fake.plain({"data": [{"id": "org/name"}]})
READY = fake.plain({"state": "ready", "phase": "ready"})
LOAD = fake.plain({"requests_running": 2, "requests_waiting": 1, "kv_cache_usage_ratio": 0.257})


def test_model_state_and_load_are_one_line(tessera, start):
    server = start({"/v1/models": MODELS, "/health": READY, "/load": LOAD})

    status, out, err = tessera("ps", server.url)

    header, row = out.splitlines()
    assert (status, err) == (0, "")
    assert header.split() == ["model", "url", "state", "running", "waiting", "KV", "cache"]
    assert row.split() == ["org/name", server.url, "ready", "2", "1", "26%"]


def test_a_service_that_loads_its_model_has_a_state_already(tessera, start):
    starting = {"state": "starting", "phase": "loading", "error": "x", "error_type": "healthcheck"}
    unready = fake.plain(starting, "503 Service Unavailable")
    server = start({"/v1/models": unready, "/health": unready, "/load": LOAD})

    status, out, _ = tessera("ps", "--url", server.url, "--json")

    assert status == 0
    assert json.loads(out) == {
        "models": [],
        "url": server.url,
        "state": "starting",
        "running": 2,
        "waiting": 1,
        "kv_cache_usage_ratio": 0.257,
    }


def test_another_server_shows_what_it_has(tessera, start):
    server = start({"/v1/models": MODELS, "/health": fake.plain(b""), "/load": fake.plain(b"[]")})

    assert tessera("ps", server.url)[1].splitlines()[1].split() == ["org/name", server.url, *"----"]


def test_a_server_cannot_control_the_terminal(tessera, start):
    evil = "\x1b[31mx"
    server = start(
        {
            "/v1/models": fake.plain({"data": [{"id": evil}]}),
            "/health": fake.plain({"state": evil}),
            "/load": fake.plain({"requests_running": evil, "kv_cache_usage_ratio": evil}),
        }
    )

    status, out, _ = tessera("ps", server.url)

    assert status == 0
    assert "\x1b" not in out


def test_without_a_server_the_status_is_1(tessera):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    status, out, err = tessera("ps", f":{port}")

    assert (status, out) == (1, "")
    assert err.startswith(f"tessera ps: error: no server answers at http://127.0.0.1:{port}")


def test_a_word_that_is_no_url_is_an_error(tessera):
    status, _, err = tessera("ps", "ftp://x")

    assert status == 2
    assert err.startswith("tessera ps: error: 'ftp://x': ")
