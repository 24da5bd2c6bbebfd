"""langchain-openai: messages, streams, bound tools and structured output, by chat and by Responses."""

import functools

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel, ValidationError
from scenario import MODEL, run, url


class Answer(BaseModel):
    """A typed answer."""

    city: str
    degrees: int


@tool
def weather(city: str, days: int = 1) -> str:
    """Return the weather of a city."""
    return f"{city}: 20 degrees for {days} days"


def model(responses):
    """Return the client."""
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{url()}/v1",
        api_key="none",
        max_tokens=200,
        temperature=0.0,
        max_retries=0,
        use_responses_api=responses,
        stream_usage=True,
    )


CONVERSATION = [
    SystemMessage("Answer."),
    HumanMessage("How warm is Rome?"),
    AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "c1"}]),
    ToolMessage("20", tool_call_id="c1"),
]


def whole(responses):
    """Ask, with a call and its result in the conversation."""
    reply = model(responses).bind_tools([weather]).invoke(CONVERSATION)
    assert reply.usage_metadata["output_tokens"] > 0


def streamed(responses):
    """Ask for a stream."""
    chunks = list(model(responses).bind_tools([weather]).stream(CONVERSATION))
    assert chunks
    assert sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks) > 0


def forced(responses):
    """Force a call, and give it back with its result."""
    bound = model(responses).bind_tools([weather], tool_choice="weather")
    reply = bound.invoke("How warm is Rome?")
    assert reply.tool_calls or reply.invalid_tool_calls
    results = [ToolMessage("20", tool_call_id=call["id"]) for call in reply.tool_calls]
    model(responses).bind_tools([weather]).invoke([HumanMessage("x"), reply, *results])


def typed_streamed(responses, method):
    """Ask for a typed answer, piece by piece."""
    list(model(responses).with_structured_output(Answer, method=method).stream("How warm is Rome?"))


def any_tool(responses):
    """Force any call, piece by piece, and give it back with its result."""
    bound = model(responses).bind_tools(
        [weather], tool_choice="any", strict=True, parallel_tool_calls=False
    )
    question = HumanMessage("How warm is Rome?")
    reply = None
    for chunk in bound.stream([question]):
        reply = chunk if reply is None else reply + chunk
    assert reply.tool_calls or reply.invalid_tool_calls
    results = [weather.invoke(call) for call in reply.tool_calls]
    model(responses).bind_tools([weather]).invoke([question, reply, *results])


def typed(responses, method):
    """Ask for a typed answer."""
    bound = model(responses).with_structured_output(Answer, method=method, include_raw=True)
    assert bound.invoke("How warm is Rome?")


steps = {}
for by_responses in (False, True):
    name = "Responses" if by_responses else "chat"
    for step in (whole, streamed, forced, any_tool):
        steps[f"{name}, {step.__name__}"] = functools.partial(step, by_responses)
    for way in ("json_schema", "function_calling", "json_mode"):
        for step in (typed, typed_streamed):
            steps[f"{name}, {step.__name__} by {way}"] = functools.partial(step, by_responses, way)
run(steps, tolerated=(OutputParserException, ValidationError, LengthFinishReasonError))
