"""A value of a wrong type, anywhere in a body, is served or refused: it never makes the service fail."""

import copy

import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from tests.http.fakes import INFO

pytestmark = pytest.mark.anyio

TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
)
MISSING = object()
VALUES = [
    MISSING,
    None,
    True,
    0,
    -1.5,
    10**30,
    "",
    "x",
    [],
    [[None]],
    [{"type": ["x"]}],
    {},
    {"type": [None]},
]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", 1]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
JSON_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {
                "begin": "<f>",
                "content": {"type": "json_schema", "json_schema": SCHEMA},
                "end": "</f>",
            }
        ],
    },
}
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "name": "u", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"},
]
CHAT = {"messages": MESSAGES, "max_tokens": 3}
BODIES = [
    (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "logit_bias": {"5": 1},
            "stop": ["x"],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
            "response_format": JSON_FORMAT,
        },
    ),
    ("/v1/chat/completions", CHAT | {"functions": [FUNCTION], "function_call": {"name": "f"}}),
    ("/v1/chat/completions", CHAT | {"response_format": TAG}),
    ("/v1/chat/completions", CHAT | {"response_format": OLDER_TAG}),
    ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function", "function": FUNCTION}]}),
    ("/v1/completions", {"prompt": ["hi"], "structured_outputs": {"structural_tag": TAG}}),
    ("/v1/completions", {"prompt": [[1, 2]], "response_format": {"type": "regex", "pattern": "a"}}),
    ("/v1/completions", {"prompt": "hi", "nvext": {"guided_choice": ["a"]}, "guided_json": None}),
    ("/generate", {"inputs": "hi", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}}),
    (
        "/v1/responses",
        {
            "instructions": "s",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {"type": "reasoning", "id": "rs_1", "summary": []},
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "i"},
                {
                    "type": "custom_tool_call_output",
                    "call_id": "c2",
                    "output": [{"type": "input_text", "text": "t"}],
                },
                {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "x"}]},
                {"type": "mcp_call", "id": "m1", "name": "f", "arguments": "{}", "output": "1"},
                {"type": "item_reference", "id": "i1"},
            ],
            "tools": [
                {"type": "function", **FUNCTION},
                {
                    "type": "custom",
                    "name": "g",
                    "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
                },
                {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]},
                {"type": "web_search", "filters": {}},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}],
            },
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "fake/model",
            "max_tokens": 3,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "is_error": False,
                            "content": [{"type": "text", "text": "1"}],
                        }
                    ],
                },
            ],
            "tools": [
                {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["x"],
        },
    ),
    (
        "/v1/messages",
        {
            "model": "fake/model",
            "max_tokens": 3,
            "messages": [{"role": "user", "content": "hi"}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]  # fmt: skip


def paths(value, start=()):
    """Yield the place of every value within another one."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        yield (*start, key)
        if isinstance(inner, dict | list):
            yield from paths(inner, (*start, key))


def changed(body, path, value):
    body = copy.deepcopy(body)
    place = body
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body


@pytest.fixture
async def server(open_client, engine, tokenizer):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)
    return await open_client(chat_template=ChatTemplate({"default": TEMPLATE}, tokenizer))


@pytest.mark.parametrize(
    ("route", "body"), BODIES, ids=[f"{route} {i}" for i, (route, _) in enumerate(BODIES)]
)
async def test_a_value_of_a_wrong_type_makes_nothing_fail(server, route, body):
    first = await server.post(route, json=body)
    failed = []
    for path in paths(body):
        for value in VALUES:
            response = await server.post(route, json=changed(body, path, value))
            if response.status_code >= 500:
                failed.append((path, value))

    assert first.status_code == 200, first.text
    assert failed == []
