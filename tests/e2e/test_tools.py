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


def response_fields(**others):
    return {
        "model": "bundled",
        "input": [{"role": "user", "content": "The weather in Paris"}],
        "tools": [
            {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True},
            {"type": "function", "name": "now", "parameters": None, "strict": True},
        ],
        "temperature": 1.2,
        "max_output_tokens": 300,
        **others,
    }


def check_item(item):
    assert (item.type, item.status) == ("function_call", "completed")
    arguments = json.loads(item.arguments)
    if item.name == "weather":
        jsonschema.validate(arguments, SCHEMA)
    else:
        assert (item.name, arguments) == ("now", {})


def test_responses_call_a_named_tool_once_with_valid_arguments(client):
    for seed in range(2):
        reply = client.responses.create(
            **response_fields(
                tool_choice={"type": "function", "name": "weather"}, extra_body={"seed": seed}
            )
        )

        (item,) = reply.output
        assert (reply.status, reply.output_text, item.name) == ("completed", "", "weather")
        check_item(item)


def test_a_streamed_response_has_the_call_of_the_reply(client):
    wanted = response_fields(
        tool_choice="required", parallel_tool_calls=False, extra_body={"seed": 3}
    )
    reply = client.responses.create(**wanted)
    events = list(client.responses.create(**wanted, stream=True))
    with client.responses.stream(**wanted) as stream:
        helped = stream.get_final_response()

    (expected,) = reply.output
    (item,) = events[-1].response.output
    check_item(item)
    assert (item.name, item.arguments) == (expected.name, expected.arguments)
    assert helped.output[0].arguments == expected.arguments
    assert helped.output[0].parsed_arguments == json.loads(expected.arguments)
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == expected.arguments
    assert [e.sequence_number for e in events] == list(range(len(events)))


def test_results_of_calls_continue_a_response(client):
    choice = {"type": "function", "name": "weather"}
    first = client.responses.create(**response_fields(tool_choice=choice, extra_body={"seed": 1}))
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items = [*response_fields()["input"], *first.output, result]

    reply = client.responses.create(**response_fields(input=items, max_output_tokens=16))

    assert reply.usage.input_tokens > first.usage.input_tokens
    assert reply.usage.output_tokens > 0
