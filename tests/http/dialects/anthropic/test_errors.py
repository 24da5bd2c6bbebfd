"""Messages: errors have the API's format, also those of layers that know no dialect."""

import asyncio

import pytest

from server import errors
from server.engine.link.protocol import EngineState
from server.http.dialects.anthropic.errors import render_error
from tests.http.dialects.anthropic.conftest import USER

pytestmark = pytest.mark.anyio

PATHS = ("/v1/messages", "/v1/messages/count_tokens")
BODY = {"max_tokens": 5, "messages": [USER]}


def error_of(response, status):
    assert response.status_code == status
    assert response.headers["request-id"] == response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    assert body["error"].keys() == {"type", "message"}
    return body["error"]["type"]


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.MalformedBodyError("x"), 400, "invalid_request_error"),
        (errors.ValidationError("x"), 400, "invalid_request_error"),
        (errors.UnauthorizedError(), 401, "authentication_error"),
        (errors.ForbiddenError("x"), 403, "permission_error"),
        (errors.NotFoundError("x"), 404, "not_found_error"),
        (errors.UnknownModelError("x"), 404, "not_found_error"),
        (errors.UnknownThreadError("x"), 404, "not_found_error"),
        (errors.MethodNotAllowedError("x", ()), 405, "invalid_request_error"),
        (errors.BodyTimeoutError("x"), 408, "invalid_request_error"),
        (errors.BodyTooLargeError("x"), 413, "request_too_large"),
        (errors.MediaTypeError("x"), 415, "invalid_request_error"),
        (errors.OverloadedError(), 429, "rate_limit_error"),
        (errors.UnavailableError("x"), 529, "overloaded_error"),
        (errors.StoppingError(), 529, "overloaded_error"),
        (errors.GenerationError("x"), 500, "api_error"),
        (errors.AbortedError(), 499, "api_error"),
        (errors.DeadlineExceededError(), 504, "timeout_error"),
        (errors.TesseraError(), 500, "api_error"),
    ],
)
def test_every_error_has_a_type_and_a_status_of_the_api(error, status, kind):
    given, body = render_error(error)

    assert (given, body.error.type) == (status, kind)


@pytest.mark.parametrize("path", PATHS)
async def test_a_missing_key_is_an_authentication_error(open_chat, path):
    client = await open_chat(api_key=("key",))

    refused = await client.post(path, json=BODY)
    accepted = [
        await client.post(path, json=BODY, headers=headers)
        for headers in ({"x-api-key": "key"}, {"authorization": "Bearer key"})
    ]

    assert error_of(refused, 401) == "authentication_error"
    assert [response.status_code for response in accepted] == [200, 200]


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_too_large_is_an_error_of_the_api(open_chat, path):
    client = await open_chat(max_body_bytes=100)

    response = await client.post(path, json=BODY | {"system": "x" * 200})

    assert error_of(response, 413) == "request_too_large"


@pytest.mark.parametrize("path", PATHS)
async def test_a_body_that_is_no_json_is_an_error_of_the_api(open_chat, path):
    client = await open_chat()

    assert error_of(await client.post(path, content=b"{"), 400) == "invalid_request_error"
    assert error_of(await client.post(path, json=[]), 400) == "invalid_request_error"
    assert error_of(await client.get(path), 405) == "invalid_request_error"
    assert error_of(await client.post(f"{path}/other", json=BODY), 404) == "not_found_error"


async def test_more_requests_than_the_limit_reach_a_rate_limit(open_chat, engine):
    client = await open_chat(max_concurrent_requests=1)
    begun = asyncio.Event()

    async def script(*_):
        begun.set()
        await asyncio.Event().wait()

    engine.script = script
    first = asyncio.create_task(client.post("/v1/messages", json=BODY))
    await begun.wait()

    response = await client.post("/v1/messages", json=BODY)
    first.cancel()

    assert error_of(response, 429) == "rate_limit_error"
    assert response.headers["retry-after"]


@pytest.mark.parametrize("path", PATHS)
async def test_an_engine_that_starts_is_an_overload(open_chat, engine, path):
    client = await open_chat()
    engine.state = EngineState.STARTING

    response = await client.post(path, json=BODY)

    assert error_of(response, 529) == "overloaded_error"
    assert response.headers["retry-after"]


async def test_a_prompt_that_is_too_long_is_refused_in_the_api_s_words(ask):
    response = await ask([{"role": "user", "content": "x" * 5000}])

    assert error_of(response, 400) == "invalid_request_error"
    assert response.json()["error"]["message"].startswith("prompt is too long: ")
    assert response.json()["error"]["message"].endswith(" tokens > 4095 maximum")


async def test_unknown_fields_are_refused_if_fields_are_strict(open_chat):
    client = await open_chat(strict_fields=True)

    refused = await client.post("/v1/messages", json=BODY | {"maxtokens": 5})
    accepted = await client.post("/v1/messages", json=BODY | {"metadata": {"user_id": "u"}})

    assert error_of(refused, 400) == "invalid_request_error"
    assert accepted.status_code == 200


async def test_other_routes_have_no_second_header_with_the_id(client):
    response = await client.get("/v1/models")

    assert "request-id" not in response.headers
    assert response.headers["x-request-id"]
