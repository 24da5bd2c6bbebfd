"""Errors of the OpenAI routes: their shape, and what is refused."""

import json

import pytest

from server.engine.link.protocol import EngineState
from server.errors import AbortedError, DeadlineExceededError, GenerationError, OverloadedError
from server.http.dialects.openai.errors import status_of
from tests.http.dialects.openai.events import failing

pytestmark = pytest.mark.anyio


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    return error


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": 2.5}, "temperature", "must be <= 2. Given: 2.5"),
        ({"temperature": "1"}, "temperature", "must be a number. Given: a string"),
        ({"temperature": 1e-9}, "temperature", "must be 0 (greedy) or >="),
        ({"top_p": 0}, "top_p", "must be > 0"),
        ({"top_k": -2}, "top_k", "must be >= -1"),
        ({"max_tokens": 0}, "max_tokens", "or 0 with `echo`"),
        ({"max_tokens": 1000}, "prompt", "`max_tokens` must be <= 128"),
        ({"min_tokens": 17}, "min_tokens", "must be <= 16"),
        ({"n": 0}, "n", "must be >= 1"),
        ({"n": 3, "best_of": 2}, "best_of", "must be >= `n`. Given: 2 and 3"),
        ({"best_of": 2, "stream": True}, "best_of", "must equal `n` when streaming"),
        ({"n": 128, "prompt": ["a", "b"]}, "prompt", "at most 128 completions"),
        ({"logprobs": 21}, "logprobs", "must be <= 20"),
        ({"seed": 2**63}, "seed", "must be <= 9223372036854775807"),
        ({"stop": ["a"] * 5}, "stop", "up to 4"),
        ({"stop": ""}, "stop.0", "cannot be empty"),
        ({"stop": [1]}, "stop.0", "must be a string"),
        ({"stop_token_ids": [300]}, "stop_token_ids", "must be < 300"),
        ({"logit_bias": {"300": 1}}, "logit_bias", "0 to 299"),
        ({"logit_bias": {"3": 101}}, "logit_bias.3", "must be <= 100"),
        ({"bad_words": [""]}, "bad_words.0", "cannot be empty"),
        ({"prompt": None}, "prompt", "Given: null"),
        ({"prompt": ""}, "prompt", "cannot be empty"),
        ({"prompt": []}, "prompt", "an empty list"),
        ({"prompt": ["a", ""]}, "prompt", "cannot be empty"),
        ({"prompt": ["a", 1]}, "prompt", "must be a string, or a list"),
        ({"prompt": [1, True]}, "prompt", "must be a string, or a list"),
        ({"prompt": [[1], [2.5]]}, "prompt", "must be a string, or a list"),
        ({"prompt": [[]]}, "prompt", "cannot be empty"),
        ({"prompt": [-1]}, "prompt", "token ids < 0. Given: -1"),
        ({"prompt": [300]}, "prompt", "300 tokens. Given: token 300"),
        ({"prompt": [2**70]}, "prompt", ""),
        ({"prompt": "x" * 128}, "prompt", "at most 127 tokens"),
        ({"truncate_prompt_tokens": 128}, "truncate_prompt_tokens", "<= 127"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1, or > 0"),
        ({"suffix": "x"}, "suffix", "<|fim_prefix|> <|fim_suffix|> <|fim_middle|>"),
        ({"suffix": "x", "echo": True}, "suffix", "and `echo` exclude each other"),
        ({"suffix": "x", "prompt": [1]}, "suffix", "needs a `prompt` that is text"),
        ({"stream_options": {}}, "stream_options", "if `stream` is true"),
        ({"response_format": {"type": "x"}}, "response_format.type", "'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "is required"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "is required"),
        ({"response_format": {"type": "text", "structures": []}}, "response_format.structures", "cannot be"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.value", "a string"),
        ({"guided_json": 3}, "guided_json", "an object or a string"),
        ({"guided_json": "{"}, "guided_json", "must be JSON"),
        ({"guided_choice": []}, "guided_choice", "cannot be empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "cannot be empty"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "exclude each other"),
    ],
)  # fmt: skip
async def test_bad_values_are_refused_by_name(complete, engine, fields, param, message):
    response = await complete(**fields)

    error = error_of(response)
    assert response.status_code == 400
    assert error["type"] == "BadRequestError"
    assert error["param"] == param
    assert message in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GenerationError, 500),
        (AbortedError, 499),
        (DeadlineExceededError, 504),
        (OverloadedError, 429),
    ],
)
def test_errors_have_a_status_that_openai_s_clients_know(error, status):
    assert status_of(error) == status


async def test_numbers_of_any_length_are_refused(client):
    for value in ("9" * 5000, "-" + "9" * 5000):
        for body in ('{"prompt": [%s]}', '{"prompt": "a", "seed": %s}'):
            response = await client.post(
                "/v1/completions",
                content=body % value,
                headers={"content-type": "application/json"},
            )
            assert response.status_code == 400, response.text
            error_of(response)


async def test_an_unknown_model_is_not_found(complete):
    error = error_of(await complete(model="gpt-4\n"))

    assert error["type"] == "NotFoundError"
    assert error["param"] == "model"
    assert error["message"] == r"the `model` `gpt-4\n` does not exist; this server has `fake/model`"


async def test_unknown_fields_are_refused_if_fields_are_strict(open_client):
    client = await open_client(strict_fields=True)

    response = await client.post("/v1/completions", json={"prompt": "a", "temprature": 1})
    known = await client.post("/v1/completions", json={"prompt": "a", "user": "me"})

    assert error_of(response)["param"] == "temprature"
    assert "did you mean `temperature`?" in error_of(response)["message"]
    assert known.status_code == 200


async def test_routes_and_methods_that_do_not_exist(client):
    missing = await client.get("/v1/engines")
    wrong = await client.get("/v1/completions")

    assert error_of(missing)["type"] == "NotFoundError"
    assert error_of(wrong)["type"] == "MethodNotAllowedError"
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        ("{", {}, 400),
        ("[]", {}, 400),
        ("{}", {"content-type": "text/plain"}, 415),
        (json.dumps({"prompt": "x" * 5000}), {}, 413),
    ],
)
async def test_bodies_that_cannot_be_read(open_client, content, headers, status):
    client = await open_client(max_body_bytes=4096)
    headers = {"content-type": "application/json"} | headers

    response = await client.post("/v1/completions", content=content, headers=headers)

    assert response.status_code == status
    error_of(response)


async def test_overload_and_a_starting_engine_ask_for_a_retry(open_client, engine):
    client = await open_client(max_concurrent_requests=1)
    client_of_many = await client.post("/v1/completions", json={"prompt": "a", "n": 2})
    engine.state = EngineState.STARTING
    starting = await client.post("/v1/completions", json={"prompt": "a"})

    assert client_of_many.status_code == 400
    assert error_of(starting)["type"] == "ServiceUnavailableError"
    assert starting.headers["retry-after"]


async def test_a_failure_of_the_engine_is_an_internal_error(complete, engine):
    engine.script = failing()

    error = error_of(await complete())

    assert error["type"] == "InternalServerError"
    assert "engine restarted" in error["message"]
