"""ag2: agents with a tool and a typed answer, by chat and by Responses."""

import functools

from ag2 import Agent
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
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
    limit = "max_tokens" if kind is OpenAIConfig else "max_output_tokens"
    config = kind(
        model=MODEL,
        base_url=f"{url()}/v1",
        api_key="none",
        temperature=0.0,
        streaming=streamed,
        max_retries=0,
        **{limit: 100},
    )
    agent = Agent("a", "Answer.", config=config, tools=tools, response_schema=output)
    assert await agent.ask("How warm is Rome?")


run(
    {
        f"{kind.__name__}, {len(tools)} tools, {output and 'typed'}, streamed {streamed}": functools.partial(
            ask, kind, tools, output, streamed
        )
        for kind in (OpenAIConfig, OpenAIResponsesConfig)
        for tools in ([], [weather])
        for output in (None, Answer)
        for streamed in (False, True)
    },
    tolerated=(ValidationError,),
)
