"""agent-framework: agents with a tool and a typed answer, by chat and by Responses."""

import functools

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from pydantic import BaseModel, ValidationError
from scenario import MODEL, run, url


class Answer(BaseModel):
    """A typed answer."""

    city: str
    degrees: int


def weather(city: str, days: int = 1) -> str:
    """Return the weather of a city."""
    return f"{city}: 20 degrees for {days} days"


async def ask(kind, tools, output, streamed):
    """Ask once."""
    client = kind(MODEL, base_url=f"{url()}/v1", api_key="none")
    options = {"max_tokens": 100, "temperature": 0.0}
    if output:
        options["response_format"] = output
    agent = Agent(client, "Answer.", tools=tools)
    if streamed:
        assert [
            piece async for piece in agent.run("How warm is Rome?", stream=True, options=options)
        ]
    else:
        assert await agent.run("How warm is Rome?", options=options)


async def loop(kind, streamed):
    """Force a call, run the tool, and ask again with its result."""
    # Nothing is stored between requests; by default, `OpenAIChatClient` sends the new messages only.
    options = {"max_tokens": 200, "temperature": 0.0, "tool_choice": "required", "store": False}
    client = kind(MODEL, base_url=f"{url()}/v1", api_key="none")
    agent = Agent(client, "Answer.", tools=[weather])
    running = agent.run("How warm is Rome?", stream=streamed, options=options)
    if streamed:
        assert [piece async for piece in running]
    else:
        assert "tool" in [message.role for message in (await running).messages]


run(
    {
        f"{kind.__name__}, {len(tools)} tools, {output and 'typed'}, streamed {streamed}": functools.partial(
            ask, kind, tools, output, streamed
        )
        for kind in (OpenAIChatClient, OpenAIChatCompletionClient)
        for tools in ([], [weather])
        for output in (None, Answer)
        for streamed in (False, True)
    }
    | {
        f"{kind.__name__}, loop, streamed {streamed}": functools.partial(loop, kind, streamed)
        for kind in (OpenAIChatClient, OpenAIChatCompletionClient)
        for streamed in (False, True)
    },
    tolerated=(ValidationError,),
)
