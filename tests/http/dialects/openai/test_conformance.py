"""Replies and events have every field that the types of OpenAI's client require, with values of these types.

The client builds its types from any JSON without checking it, so the types are made strict here.
"""

import functools
import itertools
import json
from typing import Any

import msgspec
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from model.text.chat_template import ChatTemplate
from server.engine.core.request import FinishReason
from tests.http.dialects.openai.events import chunks
from tests.http.dialects.openai.responses_api.test_answer import events
from tests.http.dialects.openai.test_response_tools import CUSTOM, SPACE, call_of
from tests.http.dialects.openai.test_tools import AWARE, CALL, OTHER_CALL, PARAMETERS
from tests.http.fakes import EOS_ID, INFO, say

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "weather", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
TOOL = {"type": "function"} | FUNCTION
FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}


# Making the type of an event takes seconds.
adapter = functools.cache(TypeAdapter)


def check(model: Any, record):
    """Check a record against a type of the client, which ignores fields that it does not know."""
    try:
        adapter(model).validate_python(record)
    except ValidationError as error:
        pytest.fail(f"{json.dumps(record)[:500]}: {error}")


@pytest.fixture
async def post(open_client, engine, tokenizer):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)
    client = await open_client(chat_template=ChatTemplate({"default": AWARE}, tokenizer))

    async def send(path, **body):
        response = await client.post(f"/v1/{path}", json=body)
        assert response.status_code == 200, response.text
        return response

    return send


REASONS = (FinishReason.EOS, FinishReason.LENGTH)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True, "logprobs": 2},
        {"n": 2, "logprobs": 0},
        {"return_token_ids": True, "user": "a"},
    ],
)
async def test_completions(post, engine, tokenizer, fields):
    for reason in (*REASONS, FinishReason.STOP):
        engine.script = say([*tokenizer.encode("Hé"), EOS_ID], reason, top=((5, -1.0),))
        options = {"include_usage": True, "continuous_usage_stats": True}

        records = [(await post("completions", prompt="a", **fields)).json()]
        records += chunks(
            await post("completions", prompt="a", stream=True, stream_options=options, **fields)
        )
        for record in records:
            for choice in record["choices"]:
                # The client reads events as replies, whose reason is not null.
                choice["finish_reason"] = choice["finish_reason"] or "stop"
                # Its type lacks that the first token of a prompt has no log-probability.
                if "echo" in fields and choice["logprobs"]["top_logprobs"][:1] == [None]:
                    choice["logprobs"]["token_logprobs"][0] = 0.0
                    choice["logprobs"]["top_logprobs"][0] = {}
            check(Completion, record)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"tools": [CHAT_TOOL, {"type": "function", "function": {"name": "now"}}]},
        {"tools": [CHAT_TOOL], "logprobs": True, "service_tier": "flex", "store": True},
        {"functions": [FUNCTION]},
        {"echo": True},
    ],
)
async def test_chat(post, answer, fields):
    body = {"messages": [USER, {"role": "assistant", "content": "x"}, USER]} | fields
    for text, reason in itertools.product(("Hé", CALL, "Hm." + CALL + OTHER_CALL), REASONS):
        answer(text, reason)

        check(ChatCompletion, (await post("chat/completions", **body)).json())
        options = {"include_usage": True}
        stream = await post("chat/completions", **body, stream=True, stream_options=options)
        for chunk in chunks(stream):
            check(ChatCompletionChunk, chunk)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"tools": [TOOL | {"defer_loading": None}, CUSTOM, SPACE]},
        {"tools": [TOOL, {"type": "web_search"}], "tool_choice": "required"},
        {"tools": [TOOL, CUSTOM], "tool_choice": {"type": "custom", "name": "patch"}},
        {"text": {"format": FORMAT, "verbosity": "low"}, "metadata": {"a": "b"}},
        {"instructions": [{"role": "developer", "content": "x"}], "truncation": "auto"},
        {"reasoning": {"effort": "low"}, "store": True, "max_output_tokens": 100},
    ],
)
async def test_responses(post, answer, fields):
    texts = ("Hé", "Hm." + CALL, call_of("patch", {"input": "é"}), call_of("crm.find", {}))
    for text, reason in itertools.product(texts, REASONS):
        answer(text, reason)

        check(Response, (await post("responses", input="a", **fields)).json())
        for event in events(await post("responses", input="a", stream=True, **fields)):
            check(ResponseStreamEvent, event)


async def test_models(client):
    listed = (await client.get("/v1/models")).json()

    assert listed["object"] == "list"
    for model in [*listed["data"], (await client.get("/v1/models/fake/model")).json()]:
        check(Model, model)


async def test_an_error_has_the_fields_of_the_api(client):
    for path in ("completions", "chat/completions", "responses"):
        error = (await client.post(f"/v1/{path}", json={"input": []})).json()["error"]

        assert set(error) == {"message", "type", "param", "code"}
