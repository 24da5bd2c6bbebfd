"""The HTTP core with a second dialect, which needs only files of its own and an entry in `DIALECTS`.

The dialect of these tests takes several prompts, generates several completions of each, cuts off stop strings, and has
its own error format.
"""

import asyncio
import itertools
import json
from dataclasses import replace

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from model.sampling.parameters import SamplingParams
from server.engine.core.request import FinishReason
from server.http import app as application
from server.http.exchange import Dialect, Exchange
from server.http.openapi import describe_route
from server.http.reply.completion import Prompt, StopStrings
from server.http.reply.generation import Generation
from server.http.responses import header
from tests.http.conftest import CONFIG
from tests.http.fakes import event, put, say
from tests.http.test_stream import Sends
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio

PATH = "/v9/write"


class WriteBody(BaseModel):
    prompts: list[str]
    n: int = 1
    best_of: int = 1
    stop: list[str] = []
    stream: bool = False


class WriteReply(msgspec.Struct):
    texts: list[str]
    reasons: list[str]
    usage: list[int]


class WriteError(msgspec.Struct):
    message: str


class Write:
    def __init__(self, context, body):
        self._context, self._body = context, WriteBody(**body)
        self.streaming = self._body.stream
        self.warnings = ("`colour` has no effect",) if self._body.stop else ()
        self.operation = "text_completion"
        self.num_sequences = self._body.best_of * len(self._body.prompts)

    async def generate(self):
        sampling = SamplingParams(max_new_tokens=9, seed=2**64 - 1)
        ids = [await self._context.encode(prompt, "prompts") for prompt in self._body.prompts]
        return Generation(
            self._context,
            [Prompt(token_ids, sampling) for token_ids in ids],
            completions_per_prompt=self._body.best_of,
            stop=StopStrings(self._body.stop, included=False),
        )

    def headers(self, generation, timings):
        return [header("x-timed", timings is not None)]

    def reply(self, generation):
        generation.select_best(self._body.n)
        return msgspec.json.encode(
            WriteReply(
                [c.text for c in generation.returned],
                [c.finish_reason.name for c in generation.returned],
                usage(generation),
            )
        )

    def renderer(self, generation):
        return WriteRenderer(generation)


def usage(generation):
    return [generation.prompt_tokens, generation.completion_tokens, generation.cached_tokens]


class WriteRenderer:
    def __init__(self, generation):
        self._generation = generation

    def token(self, completion, event):
        text = completion.push(event)
        index = self._generation.completions.index(completion)
        return b"data:%d %b\n\n" % (index, text.encode()) if text else b""

    def end(self):
        return b"data:%b\n\ndata:[DONE]\n\n" % msgspec.json.encode(usage(self._generation))

    def fail(self, error):
        return b"data:failed: %b\n\n" % error.message.encode()


def install(app, context):
    @app.post(PATH, **describe_route(WriteBody, WriteError, WriteReply))
    async def write():
        """Write."""
        return Exchange(WRITE, context, "write", lambda body, _info: Write(context, body))


WRITE = Dialect(
    prefix="/v9/",
    endpoints=("write",),
    install=install,
    render_error=lambda error: (400, WriteError(error.message)),
    error_reply=WriteError,
    bodies=(WriteBody,),
    replies=(WriteReply, WriteError),
)


@pytest.fixture
def app(engine, tokenizer, monkeypatch):
    monkeypatch.setattr(application, "DIALECTS", (WRITE, *application.DIALECTS))
    return application.create_app(engine, tokenizer, replace(CONFIG, max_concurrent_requests=8))


@pytest.fixture
async def post(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def ask(method="POST", path=PATH, **body):
            return await client.request(method, path, json=body or None)

        yield ask


def script_by_request_number(tokenizer, cached=0):
    """Make a script: request n generates "n of all", with a higher log-probability for a higher n."""

    async def script(engine, request, stream):
        stream.num_cached_tokens = cached
        text = f"{request.request_id} of all"
        await say(tokenizer.encode(text), FinishReason.LENGTH, logprob=-1.0 / request.request_id)(
            engine, request_with_logprobs(request), stream
        )

    return script


def request_with_logprobs(request):
    sampling = msgspec.structs.replace(request.sampling, logprobs=True)
    return msgspec.structs.replace(request, sampling=sampling)


async def test_every_prompt_gets_its_completions(post, engine, tokenizer):
    engine.script = script_by_request_number(tokenizer, cached=1)

    response = await post(prompts=["ab", "c"], best_of=2, n=2)

    assert response.headers["x-timed"] == "True"
    assert response.json()["usage"] == [3, 4 * 8, 2]
    assert sorted(response.json()["texts"]) == [f"{n} of all" for n in (1, 2, 3, 4)]
    assert [r.prompt_token_ids for r in engine.requests] == [
        tokenizer.encode(prompt) for prompt in ("ab", "ab", "c", "c")
    ]
    assert [r.sampling.seed for r in engine.requests] == [2**64 - 1, 0] * 2


async def test_the_best_completions_of_each_prompt_are_returned(post, engine, tokenizer):
    engine.script = script_by_request_number(tokenizer)

    response = await post(prompts=["ab", "c"], best_of=3)

    assert response.json()["texts"] == ["3 of all", "6 of all"]
    assert response.json()["usage"] == [3, 2 * 8, 0]


async def test_several_completions_share_a_stream(post, engine, tokenizer):
    engine.script = script_by_request_number(tokenizer)

    response = await post(prompts=["ab"], best_of=3, stream=True, stop=[" all"])

    events = [e.removeprefix("data:") for e in response.text.split("\n\n")[:-1]]
    assert events[-2:] == ["[2,24,0]", "[DONE]"]
    texts = {str(i): "" for i in range(3)}
    for index, text in (e.split(" ", 1) for e in events[:-2]):
        texts[index] += text
    assert texts == {"0": "1 of", "1": "2 of", "2": "3 of"}
    indices = [e[0] for e in events[:-2]]
    assert len(list(itertools.groupby(indices))) > 3  # their tokens are interleaved


async def test_a_failed_completion_ends_the_stream_of_all_completions(post, engine):
    async def script(_engine, request, stream):
        put(stream, event(72))
        await asyncio.sleep(0.01)
        if request.request_id == 2:
            put(stream, event(None, FinishReason.ERROR, error="no memory"))

    engine.script = script

    async with asyncio.timeout(GIVE_UP):
        response = await post(prompts=["ab"], best_of=3, stream=True)

    assert response.text.endswith("data:failed: Request failed during generation: no memory\n\n")
    assert sorted(engine.aborted) == [1, 3]


async def test_tokens_that_wait_for_the_client_are_sent_together_in_order(app, engine):
    may_send, blocked = asyncio.Event(), asyncio.Event()

    async def script(_engine, request, stream):
        for token in (30, 31, 32):
            put(stream, event(token))
            await blocked.wait()
        put(stream, event(33, FinishReason.LENGTH))
        if request.request_id == 3:
            may_send.set()

    engine.script = script
    connection = Sends(app, {"prompts": ["x"], "best_of": 3, "stream": True})
    take = connection.send

    async def send(message):
        if message.get("body"):
            blocked.set()
            await may_send.wait()
        await take(message)

    connection.send = send
    async with asyncio.timeout(GIVE_UP):
        await connection.run(PATH)

    events = b"".join(connection.bodies).decode().split("\n\n")[:-1]
    assert events[-1] == "data:[DONE]"
    for index in "012":
        assert len([e for e in events if e.startswith(f"data:{index} ")]) == 4
    assert len(connection.bodies) < 6


async def test_errors_have_the_format_of_the_paths_dialect(post, engine):
    engine.script = say([72], FinishReason.LENGTH)
    shapes = {}
    for path in (PATH, "/v9/nothing", "/generate", "/nothing"):
        response = await post(path=path, prompts=[""])
        shapes[path] = response.status_code, *response.json()

    assert shapes == {
        PATH: (400, "message"),
        "/v9/nothing": (400, "message"),
        "/generate": (422, "error", "error_type"),
        "/nothing": (404, "error", "error_type"),
    }
    assert (await post("PUT", prompts=[])).headers["allow"] == "POST"


async def test_a_request_with_more_sequences_than_the_limit_is_refused(post):
    response = await post(prompts=["a", "b", "c"], best_of=3)

    assert response.json() == {"message": "Model is overloaded"}


@pytest.mark.parametrize("stream", [False, True])
async def test_warnings_of_an_answer_are_a_header(post, stream):
    warned = await post(prompts=["a"], stop=["x"], stream=stream)
    other = await post(prompts=["a"], stream=stream)

    assert json.loads(warned.headers["x-tessera-warnings"]) == ["`colour` has no effect"]
    assert "x-tessera-warnings" not in other.headers


async def test_requests_of_a_dialect_are_counted_under_its_endpoint(post, engine):
    engine.script = say([72, 73], FinishReason.LENGTH)
    await post(prompts=["ab", "c"])
    await post(path="/generate", inputs="x")

    text = (await post("GET", "/metrics")).text

    assert 'tessera_requests_total{endpoint="write",outcome="length"} 1.0' in text
    assert 'tessera_requests_total{endpoint="generate",outcome="length"} 1.0' in text
    assert "tessera_request_prompt_tokens_sum 4.0" in text
    assert "tessera_request_generated_tokens_sum 6.0" in text


async def test_records_of_a_dialect_are_in_the_openapi_document(post):
    document = (await post("GET", "/openapi.json")).json()

    assert {"WriteBody", "WriteReply", "WriteError"} <= set(document["components"]["schemas"])
    assert json.dumps(document["paths"][PATH]).count("schemas/WriteError") == 11
