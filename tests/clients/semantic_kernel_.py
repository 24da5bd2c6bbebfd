"""semantic-kernel: an agent with a plugin and a typed answer, whole and streamed."""

import functools
import os

from openai import AsyncOpenAI
from pydantic import BaseModel
from scenario import MODEL, run, url
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.functions import KernelArguments, kernel_function


class Answer(BaseModel):
    """A typed answer."""

    city: str
    degrees: int


class Weather:
    """A plugin."""

    @kernel_function(description="Return the weather of a city.")
    def weather(self, city: str, days: int = 1) -> str:
        """Return the weather."""
        return f"{city}: 20 degrees for {days} days"


async def ask(plugins, output, streamed, behavior=None):
    """Ask once."""
    client = AsyncOpenAI(base_url=f"{url()}/v1", api_key="none", max_retries=0)
    settings = OpenAIChatPromptExecutionSettings(max_tokens=100, temperature=0.0)
    if output:
        settings.response_format = output
    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id=MODEL, async_client=client),
        name="a",
        instructions="Answer.",
        plugins=plugins,
        arguments=KernelArguments(settings=settings),
        function_choice_behavior=behavior,
    )
    if streamed:
        assert [piece async for piece in agent.invoke_stream(messages="How warm is Rome?")]
    else:
        assert await agent.get_response(messages="How warm is Rome?")


os.environ["OTEL_SDK_DISABLED"] = "true"
run(
    {
        f"{len(plugins)} plugins, {output and 'typed'}, streamed {streamed}": functools.partial(
            ask, plugins, output, streamed
        )
        for plugins in ([], [Weather()])
        for output in (None, Answer)
        for streamed in (False, True)
    }
    | {
        f"loop, streamed {streamed}": functools.partial(
            ask,
            [Weather()],
            None,
            streamed,
            FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=2),
        )
        for streamed in (False, True)
    }
)
