"""What a request used, in the headers of plain replies and in the details of streams."""

import asyncio

import msgspec
import pytest

from server.engine.core.request import FinishReason
from server.http.metrics.usage import RequestUsage
from tests.http.conftest import frames
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
        "device_seconds": 0.25,
        "kv_block_seconds": 3.0,
    }


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
