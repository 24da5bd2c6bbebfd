"""text-generation, the client of Text Generation Inference: generate, streams, grammars and chat.

Its streams of chat are left out: it reads the end of a stream, `[DONE]`, as JSON.
"""

import asyncio

from scenario import run, url
from text_generation import AsyncClient, Client
from text_generation.types import Grammar, GrammarType, Tool

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
WEATHER = Tool(
    type="function",
    function={
        "name": "weather",
        "description": "Return the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
)
MESSAGES = [{"role": "user", "content": "How warm is Rome?"}]
client = Client(url(), timeout=60)


def generate():
    """Generate with details."""
    reply = client.generate("def f", max_new_tokens=8, decoder_input_details=True, top_n_tokens=2)
    assert reply.details.generated_tokens == len(reply.details.tokens)


def stream():
    """Generate a stream."""
    found = list(client.generate_stream("def f", max_new_tokens=8))
    assert found[-1].generated_text is not None


def grammar():
    """Generate by a schema and by a regular expression."""
    client.generate("x", max_new_tokens=30, grammar=Grammar(type=GrammarType.Json, value=SCHEMA))
    reply = client.generate(
        "x", max_new_tokens=30, grammar=Grammar(type=GrammarType.Regex, value="(ab|cd){2}")
    )
    assert reply.generated_text in {"abab", "abcd", "cdab", "cdcd"}


def chat():
    """Chat."""
    assert client.chat(MESSAGES, max_tokens=8).choices


def chat_tools():
    """Chat with a tool, by its name."""
    reply = client.chat(MESSAGES, max_tokens=60, tools=[WEATHER], tool_choice="weather")
    assert reply.choices[0].message.tool_calls or reply.choices[0].finish_reason == "length"


async def asynchronous():
    """Generate with the asynchronous client."""
    found = AsyncClient(url(), timeout=60)
    await found.generate("def f", max_new_tokens=4)
    assert [event async for event in found.generate_stream("def f", max_new_tokens=4)]
    await asyncio.sleep(0)


run({it.__name__: it for it in (generate, stream, grammar, chat, chat_tools, asynchronous)})
