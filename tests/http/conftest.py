import contextlib
import json
from dataclasses import replace

import httpx
import pytest

from model.text.tokenizer import Tokenizer
from server.http.app import create_app
from server.http.config import HTTPConfig
from tests.http.fakes import EOS_ID, FakeEngine, save_tokenizer

CONFIG = HTTPConfig(model_id="fake/model", eos_token_ids=(EOS_ID,))


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture
async def engine(anyio_backend):
    return FakeEngine()


@pytest.fixture
def make_app(engine, tokenizer):
    def make(chat_template=None, **limits):
        config = replace(CONFIG, **limits)
        return create_app(engine, tokenizer, config, chat_template=chat_template)

    return make


@pytest.fixture
async def open_client(make_app):
    """Opens in-process clients of applications with the given limits."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(**limits):
            transport = httpx.ASGITransport(make_app(**limits), raise_app_exceptions=False)
            client = httpx.AsyncClient(transport=transport, base_url="http://test")
            return await stack.enter_async_context(client)

        yield open_one


@pytest.fixture
async def client(open_client):
    return await open_client()


@pytest.fixture
def generate(client):
    """Posts a prompt with parameters and returns the response."""

    async def post(path="/generate", inputs="hello", **parameters):
        return await client.post(path, json={"inputs": inputs, "parameters": parameters})

    return post


def frames(response):
    """Return the JSON of every event of a stream, in order."""
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(e.startswith("data:") for e in events)
    return [json.loads(e.removeprefix("data:")) for e in events]
