"""openai-agents: agents with a tool and a typed output, by Responses and by chat."""

import functools

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai import AsyncOpenAI
from pydantic import BaseModel
from scenario import MODEL, run, url


class Answer(BaseModel):
    """What an agent returns."""

    city: str
    degrees: int


@function_tool
def weather(city: str, days: int = 1) -> str:
    """Return the weather of a city."""
    return f"{city}: 20 degrees for {days} days"


async def ask(kind, output, tools, streamed):
    """Run an agent once."""
    client = AsyncOpenAI(base_url=f"{url()}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="a",
        instructions="Answer.",
        model=kind(model=MODEL, openai_client=client),
        tools=tools,
        output_type=output,
        model_settings=ModelSettings(max_tokens=200, temperature=0.0),
    )
    if not streamed:
        await Runner.run(agent, "Say hello.", max_turns=2)
        return
    running = Runner.run_streamed(agent, "Say hello.", max_turns=2)
    assert [event async for event in running.stream_events()]


async def loop(kind, streamed):
    """Force a call, which hands over to another agent."""
    client = AsyncOpenAI(base_url=f"{url()}/v1", api_key="none", max_retries=0)
    settings = ModelSettings(
        max_tokens=300, temperature=0.0, tool_choice="required", parallel_tool_calls=False
    )
    model = kind(model=MODEL, openai_client=client)
    other = Agent(
        name="b", instructions="Answer.", model=model, tools=[weather], model_settings=settings
    )
    agent = Agent(
        name="a", instructions="Hand over.", model=model, handoffs=[other], model_settings=settings
    )
    if not streamed:
        await Runner.run(agent, "How warm is Rome?", max_turns=3)
        return
    running = Runner.run_streamed(agent, "How warm is Rome?", max_turns=3)
    assert [event async for event in running.stream_events()]


set_tracing_disabled(disabled=True)
run(
    {
        f"{kind.__name__}, {len(tools)} tools, {output and 'typed'}, streamed {streamed}": functools.partial(
            ask, kind, output, tools, streamed
        )
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)
        for output in (None, Answer)
        for tools in ([], [weather])
        for streamed in (False, True)
    }
    | {
        f"{kind.__name__}, loop, streamed {streamed}": functools.partial(loop, kind, streamed)
        for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)
        for streamed in (False, True)
    },
    tolerated=(MaxTurnsExceeded, ModelBehaviorError),
)
