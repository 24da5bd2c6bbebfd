import asyncio
import threading

import pytest

from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from server.client import transport
from server.client.address import DEFAULT_URL
from server.engine.core.request import FinishReason
from server.http.app import create_app
from server.http.config import HTTPConfig
from tests.cli import fake_server as fake
from tests.http.fakes import EOS_ID, FakeEngine, event, put, save_tokenizer
from tests.http.serving import Server
from tests.waiting import GIVE_UP

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
KEY = "a-key"


class RunningService:
    """The application with a fake engine, which says ` return n`, on an event loop in a thread.

    Attributes:
        url: of the service.
        engine: the fake engine.
    """

    def __init__(self, folder, **limits):
        save_tokenizer(folder)
        tokenizer = Tokenizer.from_folder(folder)
        self._ids = [_id_of(tokenizer, char) for char in " return n"]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def start():
            self.engine = FakeEngine(self._say)
            config = HTTPConfig(model_id="fake/model", eos_token_ids=(EOS_ID,), **limits)
            template = ChatTemplate({"default": TEMPLATE}, tokenizer)
            self._server = Server(
                create_app(self.engine, tokenizer, config, chat_template=template)
            )
            await self._server.__aenter__()

        self.run(start())
        self.url = f"http://127.0.0.1:{self._server.port}"

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(GIVE_UP)

    def close(self):
        self.run(self._server.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _say(self, engine, request, stream):
        """Say the text, slowly if there is no small limit of tokens; a prompt with `fail` fails after two tokens."""
        limit = request.sampling.max_new_tokens
        stream.queue_seconds = 0.002
        if request.sampling.prompt_logprobs:
            stream.prompt_logprobs = [-1.0] * (len(request.prompt_token_ids) - 1)
        for i, token in enumerate(self._ids[:limit]):
            if request.request_id not in engine.running:
                return
            if limit > len(self._ids):
                await asyncio.sleep(0.05)
            is_last = i + 1 == min(limit, len(self._ids))
            put(stream, event(token, FinishReason.LENGTH if is_last else None))
            if request.external_id == "fails" and i == 1:
                put(stream, event(None, FinishReason.ERROR, error="it broke"))
                return


def _id_of(tokenizer, char):
    (token,) = tokenizer.encode(char)
    return token


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    running = RunningService(tmp_path_factory.mktemp("tokenizer"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def locked_service(tmp_path_factory):
    """A service that wants an API key."""
    running = RunningService(tmp_path_factory.mktemp("tokenizer"), api_key=(KEY,))
    yield running
    running.close()


@pytest.fixture
def default_service(service, monkeypatch):
    """Make the running service the one at the default address."""
    real = transport.read_url
    monkeypatch.setattr(
        transport, "read_url", lambda url: service.url if url == DEFAULT_URL else real(url)
    )
    return service


@pytest.fixture
def scripted():
    """Return a function that starts a server with scripted responses."""
    with fake.starter() as begin:
        yield begin
