"""Tools with the bundled model: its calls follow the schemas, whatever it would write by itself."""

import json

import jsonschema
import openai
import pytest

from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FORMATS = [
    "hermes",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen3-coder", "llama3", "mistral", "mistral-args")
    ),
]


@pytest.fixture(scope="module", params=FORMATS)
def client(request):
    service = Service(["--device=cpu", f"--tool-call-format={request.param}"])
    try:
        service.wait_until_healthy()
        yield openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    finally:
        service.stop()


def fields(**others):
    return {
        "model": "bundled",
        "messages": [{"role": "user", "content": "The weather in Paris"}],
        "tools": [WEATHER, CLOCK],
        "temperature": 1.2,
        "max_tokens": 300,
        **others,
    }


def check(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert (call.function.name, arguments) == ("now", {})


def test_a_named_tool_is_called_once_with_valid_arguments(client):
    for seed in range(4):
        reply = client.chat.completions.create(**fields(tool_choice=NAMED, seed=seed))

        (choice,) = reply.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        check(call)


def test_a_streamed_call_is_the_one_of_the_reply(client):
    wanted = fields(tool_choice="required", parallel_tool_calls=False, seed=3)
    reply = client.chat.completions.create(**wanted)
    with client.chat.completions.stream(**wanted) as stream:
        streamed = stream.get_final_completion()

    (expected,) = reply.choices[0].message.tool_calls
    (call,) = streamed.choices[0].message.tool_calls
    check(call)
    assert call.function.name == expected.function.name
    assert call.function.arguments == expected.function.arguments
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert not streamed.choices[0].message.content


def test_results_of_calls_continue_the_conversation(client):
    first = client.chat.completions.create(**fields(tool_choice=NAMED, seed=1)).choices[0].message
    messages = [
        *fields()["messages"],
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"},
    ]

    reply = client.chat.completions.create(**fields(messages=messages, max_tokens=8))

    assert reply.usage.completion_tokens > 0
