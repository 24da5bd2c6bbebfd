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


run(
    {
        f"{kind.__name__}, {len(tools)} tools, {output and 'typed'}, streamed {streamed}": functools.partial(
            ask, kind, tools, output, streamed
        )
        for kind in (OpenAIChatClient, OpenAIChatCompletionClient)
        for tools in ([], [weather])
        for output in (None, Answer)
        for streamed in (False, True)
    },
    tolerated=(ValidationError,),
)
