"""Invalid requests: each gets a clear error, and other requests are not affected."""

import socket

import httpx
import pytest

from tests.e2e.conftest import CLIENT
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.e2e

JSON = {"content-type": "application/json"}
BAD_BODIES = {
    "no inputs": b'{"parameters":{}}',
    "empty inputs": b'{"inputs":""}',
    "inputs of a wrong type": b'{"inputs":["a"]}',
    "a number as text": b'{"inputs":"a","parameters":{"max_new_tokens":"8"}}',
    "a bool as number": b'{"inputs":"a","parameters":{"top_k":true}}',
    "NaN": b'{"inputs":"a","parameters":{"temperature":NaN}}',
    "Infinity": b'{"inputs":"a","parameters":{"top_p":Infinity}}',
    "1e400": b'{"inputs":"a","parameters":{"temperature":1e400}}',
    "a lone surrogate": b'{"inputs":"\\ud800"}',
    "a lone surrogate among the stop strings": b'{"inputs":"a","parameters":{"stop":["\\udfff"]}}',
    "invalid UTF-8": b'{"inputs":"\xff\xfe"}',
    "invalid JSON": b'{"inputs":"a"',
    "deep nesting": b"[" * 100_000,
    "a count of 0": b'{"inputs":"a","parameters":{"max_new_tokens":0}}',
    "a negative count": b'{"inputs":"a","parameters":{"max_new_tokens":-1}}',
    "a huge count": b'{"inputs":"a","parameters":{"max_new_tokens":1000000000000}}',
    "a huge top_n_tokens": b'{"inputs":"a","parameters":{"top_n_tokens":1000000000}}',
    "a huge best_of": b'{"inputs":"a","parameters":{"best_of":5000000,"do_sample":true}}',
    "a stop id outside the vocabulary": b'{"inputs":"a","parameters":{"stop_token_ids":[99999999]}}',
    "an unknown field": b'{"inputs":"a","parameters":{"max_tokens":8}}',
    "an over-long prompt": b'{"inputs":"' + b"word " * 20_000 + b'"}',
}
# Words that the message must contain: the field, the value or the limit.
NAMES = {
    "a negative count": ["max_new_tokens", "-1"],
    "a huge best_of": ["best_of", "2"],
    "a huge top_n_tokens": ["top_n_tokens", "5"],
    "an unknown field": ["max_tokens", "max_new_tokens"],
    "an over-long prompt": ["2047"],
}


@pytest.fixture(autouse=True)
def later_requests_are_served(bundled_service):
    yield
    reply = CLIENT.post(
        f"{bundled_service.url}/generate",
        json={"inputs": "import ", "parameters": {"max_new_tokens": 4}},
    )
    assert reply.status_code == 200
    assert CLIENT.get(f"{bundled_service.url}/health").status_code == 200
    assert bundled_service.metric("tessera_engine_restarts_total") == 0
    total = bundled_service.metric("tessera_kv_blocks")
    assert bundled_service.metric("tessera_kv_blocks_free") == total


@pytest.mark.parametrize("route", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_bad_body_gets_an_error_with_the_documented_fields(bundled_service, route, body):
    reply = CLIENT.post(f"{bundled_service.url}{route}", content=body, headers=JSON)

    assert 400 <= reply.status_code < 500
    assert set(reply.json()) == {"error", "error_type"}
    assert "Traceback" not in reply.text
    assert len(reply.text) < 1000, "the request is not repeated"


@pytest.mark.parametrize("name", NAMES)
def test_the_error_names_the_value_or_the_limit(bundled_service, name):
    reply = CLIENT.post(f"{bundled_service.url}/generate", content=BAD_BODIES[name], headers=JSON)

    assert reply.status_code == 422
    for word in NAMES[name]:
        assert word in reply.json()["error"]


def test_the_error_for_an_over_long_prompt_names_both_lengths(bundled_service):
    url = f"{bundled_service.url}/generate"
    text = "word " * 3000
    tokens = len(CLIENT.post(f"{bundled_service.url}/tokenize", json={"inputs": text}).json())
    error = CLIENT.post(url, json={"inputs": text}).json()["error"]

    assert str(tokens) in error
    assert "2048" in error


def test_a_50_mb_body_is_refused_before_it_is_read(bundled_service):
    head = (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 50000000\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", bundled_service.port), timeout=GIVE_UP) as client:
        client.sendall(head + b'{"inputs":"')
        answer = client.recv(65536)

    assert b" 413 " in answer.splitlines()[0]


def test_a_50_mb_body_of_unknown_length_is_refused_at_the_limit(bundled_service):
    def chunks():
        for _ in range(50):
            yield b"x" * 1_000_000

    try:
        status = CLIENT.post(f"{bundled_service.url}/generate", content=chunks()).status_code
    except httpx.TransportError:
        status = 413  # the server closed the connection before everything was sent

    assert status == 413
