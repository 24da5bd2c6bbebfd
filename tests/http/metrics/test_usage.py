"""What a request used, in the headers of plain replies and in the details of streams."""

import asyncio

import msgspec
import pytest

from server.engine.core.request import FinishReason
from server.http.context import AppContext
from server.http.metrics.usage import RequestUsage
from tests.http.conftest import frames
from tests.http.dialects.openai.events import chunks
from tests.http.fakes import USAGE, event, put, say
from tests.waiting import GIVE_UP

pytestmark = pytest.mark.anyio

BODY = {"inputs": "hello"}
EXPECTED = {
    "queue_ms": 2.0,
    "prefill_ms": 250.0,
    "decode_ms": 500.0,
    "computed_prompt_tokens": 4,
    "cached_prompt_tokens": 2,
    "recomputed_tokens": 1,
    "steps": 3,
    "draft_tokens": 5,
    "accepted_tokens": 4,
    "device_seconds": 0.125,
    "kv_block_seconds": 1.5,
}


def usage_of(response):
    names = [(f, f"x-tessera-{f.replace('_', '-')}") for f in RequestUsage.__struct_fields__]
    return {field: float(response.headers[name]) for field, name in names}


def unfinished(token_ids):
    async def script(_engine, _request, stream):
        stream.queue_seconds = 0.002
        for token_id in token_ids:
            put(stream, event(token_id))

    return script


@pytest.fixture
def slow_to_stop(engine):
    """The engine reports what a stopped request used only after `release` is set."""
    release = asyncio.Event()
    finish = engine.stop_request

    def stop(request_id):
        async def later():
            await release.wait()
            finish(request_id)

        engine._tasks.add(asyncio.ensure_future(later()))

    engine.stop_request = stop
    return release


async def test_a_plain_reply_reports_what_the_request_used(generate):
    assert usage_of(await generate()) == EXPECTED


async def test_usage_is_summed_over_completions_and_their_longest_times_are_reported(
    generate, engine
):
    longer = msgspec.structs.replace(USAGE, decode_seconds=0.75, num_steps=4)

    async def script(engine, request, stream):
        stream.queue_seconds = 0.001 * request.request_id
        one = USAGE if request.request_id == 1 else longer
        put(stream, msgspec.structs.replace(event(1, FinishReason.LENGTH), usage=one))

    engine.script = script

    response = await generate(best_of=2, do_sample=True)

    assert usage_of(response) == EXPECTED | {
        "decode_ms": 750.0,
        "computed_prompt_tokens": 8,
        "cached_prompt_tokens": 4,
        "recomputed_tokens": 2,
        "steps": 7,
        "draft_tokens": 10,
        "accepted_tokens": 8,
        "device_seconds": 0.25,
        "kv_block_seconds": 3.0,
    }


def lengths_by_prompt_and_seed(tokenizer):
    """Make a script: a prompt of n tokens gets n + 1 tokens for its first seed, one more for each further seed."""

    async def script(engine, request, stream):
        first = min(r.sampling.seed for r in engine.requests)
        count = len(request.prompt_token_ids) + 1 + request.sampling.seed - first
        # The completions of a prompt that come after its first find its tokens in the cache.
        stream.num_cached_tokens = 1 if request.sampling.seed == first else 77
        await say(tokenizer.encode("x" * count), FinishReason.LENGTH)(engine, request, stream)

    return script


def openai_usage(response, stream):
    if not stream:
        return response.json()["usage"]
    usages = [chunk["usage"] for chunk in chunks(response)]
    assert all(usage is None for usage in usages[:-1])
    return usages[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "completion_tokens", "cached"),
    [
        ({"prompt": "abc"}, 3, 4, 1),
        ({"prompt": "abc", "n": 2}, 3, 4 + 5, 1),
        ({"prompt": "abc", "n": 3}, 3, 4 + 5 + 6, 1),
        ({"prompt": ["abc", "a"], "n": 2}, 3 + 1, 4 + 5 + 2 + 3, 2),
    ],
)
async def test_usage_counts_each_prompt_once_and_the_tokens_of_all_completions(
    client, engine, tokenizer, fields, prompt_tokens, completion_tokens, cached, stream
):
    engine.script = lengths_by_prompt_and_seed(tokenizer)
    body = fields | {"seed": 5, "stream": stream, "stream_options": {"include_usage": True}}
    if not stream:
        del body["stream_options"]

    response = await client.post("/v1/completions", json=body)

    usage = openai_usage(response, stream)
    assert usage["prompt_tokens"] == prompt_tokens
    assert usage["completion_tokens"] == completion_tokens
    assert usage["total_tokens"] == prompt_tokens + completion_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_of_a_chat_with_several_choices_counts_the_conversation_once(
    client, engine, tokenizer, monkeypatch, stream
):
    async def encode_chat(self, messages, **options):
        return self.tokenizer.encode(messages[0]["content"])

    monkeypatch.setattr(AppContext, "encode_chat", encode_chat)
    engine.script = lengths_by_prompt_and_seed(tokenizer)
    body = {"messages": [{"role": "user", "content": "abcd"}], "n": 2, "seed": 5}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}

    usage = openai_usage(await client.post("/v1/chat/completions", json=body), stream)

    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 5 + 6)
    assert usage["total_tokens"] == 15
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1


async def test_the_metrics_of_a_request_with_several_completions_count_it_once(
    client, engine, tokenizer
):
    engine.script = lengths_by_prompt_and_seed(tokenizer)

    await client.post("/v1/completions", json={"prompt": ["abc", "a"], "n": 2, "seed": 5})

    lines = (await client.get("/metrics")).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    counted = {name: float(value) for name, value in values.items() if float(value)}
    requests = {n: v for n, v in counted.items() if n.startswith("tessera_requests_total")}
    assert list(requests.values()) == [1.0]
    for name, total in {"prompt": 4, "generated": 4 + 5 + 2 + 3, "max_new": None}.items():
        assert counted[f"tessera_request_{name}_tokens_count"] == 1
        assert total in (None, counted[f"tessera_request_{name}_tokens_sum"])
    for name in ("duration", "queue", "prefill", "decode"):
        assert counted[f"tessera_request_{name}_seconds_count"] == 1
    assert counted["tessera_time_to_first_token_seconds_count"] == 4
    assert counted["tessera_inter_token_latency_seconds_count"] == 3 + 4 + 1 + 2


async def test_a_streams_details_report_what_the_request_used(client, engine, tokenizer):
    engine.script = say(tokenizer.encode("four"), FinishReason.LENGTH)

    body = BODY | {"parameters": {"details": True}}
    events = frames(await client.post("/generate_stream", json=body))

    assert [e["details"] for e in events[:-1]] == [None, None, None]
    assert events[-1]["details"]["usage"] == EXPECTED


async def test_a_reply_ended_by_a_stop_string_waits_for_the_engines_figures(
    generate, engine, slow_to_stop, tokenizer
):
    engine.script = unfinished(tokenizer.encode("one two"))
    task = asyncio.ensure_future(generate(stop=["two"]))
    await asyncio.sleep(0.05)
    assert not task.done()

    slow_to_stop.set()

    response = await asyncio.wait_for(task, GIVE_UP)
    assert response.json()["generated_text"] == "one two"
    assert usage_of(response)["device_seconds"] == EXPECTED["device_seconds"]


async def test_a_stream_ended_by_a_stop_string_waits_for_the_engines_figures(
    client, engine, slow_to_stop, tokenizer
):
    engine.script = unfinished(tokenizer.encode("one two"))
    body = BODY | {"parameters": {"details": True, "stop": ["two"]}}
    task = asyncio.ensure_future(client.post("/generate_stream", json=body))
    await asyncio.sleep(0.05)
    assert not task.done()

    slow_to_stop.set()

    events = frames(await asyncio.wait_for(task, GIVE_UP))
    assert len(events) == 7
    assert events[-1]["generated_text"] == "one two"
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert events[-1]["details"]["usage"]["device_seconds"] == EXPECTED["device_seconds"]


async def test_a_client_that_leaves_before_the_figures_are_known_is_counted_as_an_abort(
    make_app, engine, slow_to_stop, tokenizer
):
    from tests.http.test_stream import Sends

    engine.script = unfinished(tokenizer.encode("one two"))
    body = BODY | {"parameters": {"details": True, "stop": ["two"]}}
    connection = Sends(make_app(), body)
    task = asyncio.create_task(connection.run())
    await asyncio.sleep(0.05)

    connection.gone.set()
    await asyncio.sleep(0.01)
    slow_to_stop.set()

    await asyncio.wait_for(task, GIVE_UP)
    assert engine.running == set()
    assert b"one two" not in b"".join(connection.bodies)


def test_clients_of_tgi_accept_the_usage_in_the_details():
    from huggingface_hub import TextGenerationStreamOutput

    details = {"finish_reason": "length", "generated_tokens": 1, "seed": None, "input_length": 3}
    frame = {
        "index": 1,
        "token": {"id": 1, "text": "a", "logprob": -1.0, "special": False},
        "generated_text": "a",
        "details": details | {"usage": EXPECTED},
    }

    parsed = TextGenerationStreamOutput.parse_obj_as_instance(frame)

    assert parsed.details.generated_tokens == 1
