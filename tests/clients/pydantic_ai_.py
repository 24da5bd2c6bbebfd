"""pydantic-ai: agents with tools and each kind of typed output, by chat and by Responses."""

import functools

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits
from scenario import MODEL, run, url


class Answer(BaseModel):
    """What an agent returns."""

    city: str
    degrees: int


def weather(city: str, days: int = 1) -> str:
    """Return the weather of a city."""
    return f"{city}: 20 degrees for {days} days"


async def ask(kind, output, tools, streamed):
    """Run an agent once."""
    model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url()}/v1", api_key="none"))
    agent = Agent(
        model,
        output_type=output,
        tools=tools,
        instructions="Answer.",
        model_settings={"max_tokens": 200, "temperature": 0.0},
    )
    limits = UsageLimits(request_limit=3)
    if not streamed:
        await agent.run("Say hello.", usage_limits=limits)
        return
    async with agent.run_stream("Say hello.", usage_limits=limits) as result:
        async for _ in result.stream_output(debounce_by=None):
            pass


OUTPUTS = {
    "text": str,
    "tool output": ToolOutput(Answer),
    "native output": NativeOutput(Answer),
    "prompted output": PromptedOutput(Answer),
}
run(
    {
        f"{kind.__name__}, {len(tools)} tools, {name}, streamed {streamed}": functools.partial(
            ask, kind, output, tools, streamed
        )
        for kind in (OpenAIChatModel, OpenAIResponsesModel)
        for name, output in OUTPUTS.items()
        for tools in ([], [weather])
        for streamed in (False, True)
    },
    tolerated=(UnexpectedModelBehavior, UsageLimitExceeded),
)
