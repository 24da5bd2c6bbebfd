"""`priority`, `timeout_ms` and `cache_salt`: how they reach the engine, and how a deadline ends a request."""

import json
import time

import msgspec
import pytest

from server.engine.core.plan_report import DeterminismPlan
from server.engine.core.request import FinishReason
from server.http.body.request_options import RequestOptionFields, RequestOptions
from server.http.edge.key_limits import KeyLimits
from tests.http.conftest import frames
from tests.http.fakes import INFO, event, put

pytestmark = pytest.mark.anyio


async def test_the_engine_gets_the_options(generate, engine):
    before = time.monotonic()

    assert (await generate(priority=3, timeout_ms=5000, cache_salt="tenant")).status_code == 200

    (request,) = engine.requests
    assert (request.priority, request.client_priority, request.cache_salt) == (3, 3, "tenant")
    assert before + 5 <= request.deadline <= time.monotonic() + 5


async def test_without_a_key_a_low_priority_orders_only_the_clients_own_requests_and_says_so(
    generate, engine
):
    response = await generate(priority=-3)

    (request,) = engine.requests
    assert (request.priority, request.client_priority) == (0, -3)
    assert json.loads(response.headers["x-tessera-warnings"]) == [
        "`priority` below 0 orders only requests of the same client"
    ]


@pytest.mark.parametrize(
    ("priority", "between_clients", "warns"),
    [(-9, -5, True), (-5, -5, False), (-1, -1, False), (7, 7, False)],
)
async def test_a_keys_priority_counts_between_clients_down_to_its_limit(
    open_client, engine, priority, between_clients, warns
):
    client = await open_client(api_key=("k",), key_limits={"k": KeyLimits(lowest_priority=-5)})

    response = await client.post(
        "/generate",
        json={"inputs": "x", "parameters": {"priority": priority}},
        headers={"x-api-key": "k"},
    )

    (request,) = engine.requests
    assert (request.priority, request.client_priority) == (between_clients, priority)
    assert ("x-tessera-warnings" in response.headers) == warns


@pytest.mark.parametrize(("timeout_ms", "seconds"), [(None, 4.0), (4000, 4.0), (50, 0.05)])
async def test_a_keys_requests_end_after_its_longest_time(open_client, engine, timeout_ms, seconds):
    client = await open_client(api_key=("k",), key_limits={"k": KeyLimits(longest_timeout_ms=4000)})
    before = time.monotonic()

    await client.post(
        "/generate",
        json={"inputs": "x", "parameters": {"timeout_ms": timeout_ms}},
        headers={"x-api-key": "k"},
    )

    (request,) = engine.requests
    assert before + seconds <= request.deadline <= time.monotonic() + seconds


async def test_a_longer_time_than_the_key_allows_is_refused_with_the_limit(open_client, engine):
    client = await open_client(api_key=("k",), key_limits={"k": KeyLimits(longest_timeout_ms=4000)})

    response = await client.post(
        "/generate",
        json={"inputs": "x", "parameters": {"timeout_ms": 4001}},
        headers={"x-api-key": "k"},
    )

    assert response.status_code == 422
    assert (
        "`timeout_ms` must be <= 4000, the longest that the API key allows. Given: 4001"
        in response.text
    )
    assert not engine.requests


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("value", [True, False, None])
async def test_the_engine_gets_whether_a_request_is_deterministic(client, engine, path, value):
    fields = {"deterministic": value}
    tgi = {"inputs": "x", "parameters": fields}

    response = await client.post(
        path, json=tgi if path == "/generate" else {"prompt": "x"} | fields
    )

    assert response.status_code == 200
    (request,) = engine.requests
    assert request.deterministic is bool(value)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        (None, None),
        ({}, None),
        ({"enabled": True}, 31),
        ({"enabled": False}, 0),
        ({"enabled": False, "max_tokens": 3}, 0),
        ({"max_tokens": 3}, 3),
        ({"enabled": True, "max_tokens": 0}, 0),
    ],
)
async def test_the_engine_gets_how_many_tokens_may_be_proposed(
    client, engine, path, speculation, expected
):
    fields = {"speculation": speculation, "deterministic": True}
    tgi = {"inputs": "x", "parameters": fields}

    response = await client.post(
        path, json=tgi if path == "/generate" else {"prompt": "x"} | fields
    )

    assert response.status_code == 200
    (request,) = engine.requests
    assert request.max_draft_tokens == expected


@pytest.mark.parametrize(
    "speculation",
    [{"max_tokens": 32}, {"max_tokens": -1}, {"enabled": "yes"}, {"n_max": 3}, True, 3],
)
async def test_a_wrong_limit_of_drafts_is_refused(generate, engine, speculation):
    response = await generate(speculation=speculation)

    assert response.status_code == 422
    assert "speculation" in response.json()["error"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"enabled": True}, True),
        ({"max_tokens": 2}, True),
        ({"enabled": False}, False),
        ({}, False),
    ],
)
async def test_a_request_without_equal_bits_is_told_that_it_has_no_drafts(
    client, engine, fields, warned
):
    plan = DeterminismPlan(requests="on request", why="kernels")
    engine.info = msgspec.structs.replace(
        INFO, plan=msgspec.structs.replace(INFO.plan, deterministic=plan)
    )

    reply = (
        await client.post("/v1/completions", json={"prompt": "x", "speculation": fields})
    ).json()

    text = "`speculation` has no effect: only deterministic requests have drafts"
    assert reply.get("warnings", []) == [text] * warned
    engine.info = msgspec.structs.replace(engine.info, exact_rows=8)
    reply = await client.post("/v1/completions", json={"prompt": "x", "speculation": fields})
    assert "warnings" not in reply.json()


@pytest.mark.parametrize(
    ("service", "fields", "warning"),
    [
        (0, {"enabled": True}, "`speculation` has no effect: the service has no drafts (--max-draft-tokens 0)"),
        (0, {"enabled": False}, None),
        (7, {"max_tokens": 20}, "`speculation.max_tokens` 20 is limited to 7"),
        (7, {"max_tokens": 7}, None),
        (7, {"enabled": True}, None),
    ],
)  # fmt: skip
async def test_a_limit_above_that_of_the_service_is_said(client, engine, service, fields, warning):
    engine.info = msgspec.structs.replace(INFO, max_draft_tokens=service)

    body = {"prompt": "x", "speculation": fields, "deterministic": True}
    reply = (await client.post("/v1/completions", json=body)).json()

    assert reply.get("warnings", []) == ([] if warning is None else [warning])


async def test_a_deterministic_request_is_refused_with_the_reason_where_no_kernel_supports_it(
    generate, engine
):
    plan = DeterminismPlan(requests="none", why="needs sm_80, this is sm_75")
    engine.info = msgspec.structs.replace(
        INFO, plan=msgspec.structs.replace(INFO.plan, deterministic=plan)
    )

    response = await generate(deterministic=True)

    assert response.status_code == 422
    assert response.json()["error"] == (
        "Input validation error: `deterministic` must be false here: needs sm_80, this is sm_75. "
        "Given: true"
    )
    assert (await generate(deterministic=False)).status_code == 200


@pytest.mark.parametrize("value", [None, "absent"])
async def test_without_options_the_engine_gets_the_defaults(client, engine, value):
    parameters = {} if value else dict.fromkeys(RequestOptionFields.model_fields)

    await client.post("/generate", json={"inputs": "x", "parameters": parameters})

    (request,) = engine.requests
    assert (request.priority, request.deadline, request.cache_salt) == (0, None, None)


async def test_every_sequence_of_a_request_has_its_options(generate, engine):
    await generate(do_sample=True, best_of=2, priority=4, timeout_ms=9, cache_salt="s")

    first, second = engine.requests
    assert (first.priority, first.deadline, first.cache_salt) == (
        second.priority,
        second.deadline,
        second.cache_salt,
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("priority", 2**31, "`priority` must be <= 2147483647. Given: 2147483648"),
        ("priority", 1.5, "`priority` must be an integer. Given: 1.5"),
        ("timeout_ms", 0, "`timeout_ms` must be >= 1. Given: 0"),
        ("timeout_ms", 86_400_001, "`timeout_ms` must be <= 86400000. Given: 86400001"),
        ("timeout_ms", "5", "`timeout_ms` must be an integer. Given: a string"),
        ("cache_salt", "", "`cache_salt` cannot be empty"),
        ("cache_salt", "x" * 257, "`cache_salt` must have at most 256 characters. Given: 257"),
        ("cache_salt", 3, "`cache_salt` must be a string. Given: 3"),
    ],
)
async def test_a_value_out_of_range_is_refused(generate, field, value, message):
    response = await generate(**{field: value})

    assert response.status_code == 422
    assert response.json()["error"] == f"Input validation error: {message}"


def test_the_options_of_a_body_without_the_fields_are_the_defaults():
    assert RequestOptionFields().request_options(INFO) == RequestOptions(0, None, None)


async def expire_in_the_queue(_engine, _request, stream):
    put(stream, event(None, FinishReason.TIMEOUT))


async def expire_with_a_token(_engine, _request, stream):
    put(stream, event(72))
    put(stream, event(105, FinishReason.TIMEOUT))


async def test_a_request_that_expires_before_its_first_token_gets_504(client, generate, engine):
    engine.script = expire_in_the_queue

    response = await generate(timeout_ms=10)

    assert response.status_code == 504
    assert response.json() == {
        "error": "`timeout_ms` passed before the generation was complete",
        "error_type": "timeout",
    }
    text = (await client.get("/metrics")).text
    assert 'tessera_requests_total{endpoint="generate",outcome="timeout"} 1.0' in text


async def test_a_stream_that_expires_before_its_first_token_ends_with_an_error_event(
    generate, engine
):
    engine.script = expire_in_the_queue

    (only,) = frames(await generate("/generate_stream", timeout_ms=10))

    assert only["error_type"] == "timeout"


async def test_a_request_that_expires_later_ends_with_the_tokens_it_has(client, generate, engine):
    engine.script = expire_with_a_token

    response = await generate(timeout_ms=10, details=True)

    assert response.status_code == 200
    assert response.json()["details"]["finish_reason"] == "timeout"
    assert response.json()["details"]["generated_tokens"] == 2
    text = (await client.get("/metrics")).text
    assert 'tessera_requests_total{endpoint="generate",outcome="timeout"} 1.0' in text


async def test_a_stream_that_expires_later_ends_with_a_finish_reason(generate, engine):
    engine.script = expire_with_a_token

    events = frames(await generate("/generate_stream", timeout_ms=10, details=True))

    assert len(events) == 2
    assert events[-1]["details"]["finish_reason"] == "timeout"
    assert events[-1]["generated_text"] is not None


async def test_the_fields_are_in_the_openapi_document(client):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    properties = schemas["GenerateParameters"]["properties"]

    assert set(RequestOptionFields.model_fields) <= set(properties)
    assert json.dumps(properties["timeout_ms"]).count("86400000") == 1
