import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from tests.http.dialects.openai.test_tools import PLAIN
from tests.http.fakes import INFO

USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def large_context(engine):
    engine.info = msgspec.structs.replace(INFO, max_model_len=4096, max_total_tokens=4096)


@pytest.fixture
def open_chat(open_client, tokenizer):
    """Opens a client of a server with a chat template."""

    async def open_one(template=PLAIN, **limits):
        return await open_client(
            chat_template=ChatTemplate({"default": template}, tokenizer), **limits
        )

    return open_one


@pytest.fixture
def ask(open_chat):
    """Posts a body to /v1/messages of a server with a given chat template."""

    async def post(messages=(USER,), template=PLAIN, **fields):
        client = await open_chat(template)
        body = {"model": "fake/model", "max_tokens": 100, "messages": list(messages), **fields}
        return await client.post("/v1/messages", json=body)

    return post


@pytest.fixture
def prompt(engine, tokenizer):
    """Returns the prompt that was submitted last."""
    return lambda: tokenizer.decode(engine.requests[-1].prompt_token_ids)
