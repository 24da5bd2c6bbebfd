"""anthropic, the Python SDK: messages, streams, tools and their results, counting tokens, errors."""

from typing import Literal

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel
from scenario import MODEL, WEATHER, run, url

client = anthropic.Anthropic(base_url=url(), api_key="none", max_retries=0)
TOOLS = [{"name": "weather", "description": "Return the weather.", "input_schema": WEATHER}]
HELLO = [{"role": "user", "content": "How warm is Rome?"}]
COMMON = {"model": MODEL, "max_tokens": 60, "messages": HELLO}


def create():
    """Ask once."""
    reply = client.messages.create(**COMMON, system="Answer.", stop_sequences=["###"])
    assert reply.type == "message"
    assert reply.usage.output_tokens > 0
    assert reply.stop_reason in {"end_turn", "max_tokens", "stop_sequence"}


def stream():
    """Ask with the stream helper."""
    with client.messages.stream(**COMMON) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == "".join(block.text for block in final.content)
    assert final.usage.input_tokens > 0


def tools():
    """Force a call, and give it back with its result."""
    reply = client.messages.create(
        **COMMON, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}
    )
    calls = [block for block in reply.content if block.type == "tool_use"]
    assert calls or reply.stop_reason == "max_tokens"
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "20"} for call in calls]
    if results:
        messages = [*HELLO, {"role": "assistant", "content": reply.content}]
        messages.append({"role": "user", "content": results})
        client.messages.create(**{**COMMON, "messages": messages}, tools=TOOLS)


def tools_streamed():
    """Force a call in a stream."""
    with client.messages.stream(**COMMON, tools=TOOLS, tool_choice={"type": "any"}) as events:
        for _ in events:
            pass
        final = events.get_final_message()
    assert final.stop_reason in {"tool_use", "max_tokens"}


class Answer(BaseModel):
    """A typed answer."""

    city: Literal["Rome", "Oslo"]
    warm: bool


def typed():
    """Ask for a typed answer."""
    for messages in (client.messages, client.beta.messages):
        reply = messages.parse(**COMMON, output_format=Answer)
        assert isinstance(reply.parsed_output, Answer)


@beta_tool
def forecast(city: str) -> str:
    """Return the forecast of a city."""
    return f"{city}: 20 degrees"


def runner():
    """Let the SDK run a tool over several turns, in a thread of messages."""
    choice = {"type": "any", "disable_parallel_tool_use": True}
    for streamed in (False, True):
        turns = client.beta.messages.tool_runner(
            **COMMON | {"max_tokens": 300},
            tools=[forecast],
            tool_choice=choice,
            max_iterations=3,
            stream=streamed,
        )
        finals = [turn.get_final_message() if streamed else turn for turn in turns]
        assert len(finals) == 3 or finals[-1].stop_reason == "max_tokens"


def documents():
    """Send a document of text and a search result."""
    source = {"type": "text", "media_type": "text/plain", "data": "Rome: 20 degrees"}
    found = {"source": "x", "title": "Rome", "content": [{"type": "text", "text": "20 degrees"}]}
    blocks = [{"type": "document", "source": source}, {"type": "search_result", **found}]
    message = {"role": "user", "content": [*blocks, {"type": "text", "text": "How warm is Rome?"}]}
    client.messages.create(**{**COMMON, "messages": [message]})


def count():
    """Count the tokens of a request."""
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=TOOLS).input_tokens
    usage = client.messages.create(**COMMON, tools=TOOLS).usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted == usage.input_tokens + cached


def models():
    """List the models."""
    assert MODEL in [model.id for model in client.models.list()]


def error():
    """Send a request that is refused."""
    try:
        client.messages.create(**{**COMMON, "messages": []})
    except anthropic.BadRequestError as error:
        refused = error
    else:
        raise AssertionError("no messages were accepted")
    assert refused.body["error"]["type"] == "invalid_request_error"


STEPS = (
    create, stream, tools, tools_streamed, typed, runner, documents, count, models, error,
)  # fmt: skip
run({it.__name__: it for it in STEPS})
