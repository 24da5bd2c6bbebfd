"""Messages: the tokens of a prompt are counted without generating."""

import json

import pytest

from tests.http.dialects.anthropic.conftest import USER
from tests.http.dialects.anthropic.test_conversation import HEADER, text
from tests.http.dialects.anthropic.test_tools import SEARCH, TOOL
from tests.http.dialects.openai.test_tools import AWARE, PLAIN

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("template", [PLAIN, AWARE + PLAIN])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": [text(f"{HEADER}1;"), text("Be brief.")]},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": {"type": "none"}},
        {"messages": [USER, {"role": "assistant", "content": "The sum"}]},
        {"model": "claude-opus-4-8", "thinking": {"type": "adaptive"}},
    ],
)
async def test_the_count_is_that_of_the_message(open_chat, template, fields):
    client = await open_chat(template)
    body = {"messages": [USER], **fields}

    count = await client.post("/v1/messages/count_tokens", json=body)
    message = await client.post("/v1/messages", json=body | {"max_tokens": 5})

    usage = message.json()["usage"]
    assert count.json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }


async def test_nothing_is_generated(open_chat, engine):
    client = await open_chat()

    await client.post("/v1/messages/count_tokens", json={"messages": [USER]})

    assert engine.requests == []


async def test_a_prompt_that_does_not_fit_is_counted(open_chat):
    client = await open_chat()
    messages = [{"role": "user", "content": "x" * 5000}]

    response = await client.post("/v1/messages/count_tokens", json={"messages": messages})

    assert response.json()["input_tokens"] > 5000


async def test_what_has_no_effect_is_in_the_header(open_chat):
    client = await open_chat()
    body = {"messages": [USER], "tools": [SEARCH], "other": 1}

    response = await client.post("/v1/messages/count_tokens", json=body)

    assert json.loads(response.headers["x-tessera-warnings"]) == [
        "`other` is unknown and has no effect",
        "`tools.0` cannot be called: only tools with a schema can",
    ]


async def test_bad_messages_are_refused(open_chat):
    client = await open_chat()

    response = await client.post("/v1/messages/count_tokens", json={"messages": []})

    assert response.status_code == 400
    assert response.json()["error"]["message"] == "`messages` cannot be empty"
