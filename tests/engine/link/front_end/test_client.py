"""The front end's side of the engine, against real engine processes with an arithmetic model."""

import asyncio
import contextlib
import dataclasses
import errno
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig, StepMessage
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.link.child_process import ChildStartError
from server.engine.link.front_end.client import EngineClient, EngineUnavailableError
from server.engine.link.protocol import AbortTarget, EngineState
from server.engine.link.spawn import spawn
from tests.engine.link.fake_engine import next_token
from tests.waiting import reached

COMMAND = (sys.executable, "-m", "tests.engine.link.fake_engine")


@contextlib.asynccontextmanager
async def running(behaviour="ok", hang_seconds=60.0, ready=True):
    client = EngineClient(
        EngineConfig(model_path=behaviour, model_id="fake"), hang_seconds, COMMAND
    )
    await client.start()
    try:
        if ready:
            await client.wait_until_ready()
        yield client
    finally:
        await client.stop()


def submit(client, prompt, max_new_tokens=8, **sampling):
    return client.submit(
        GenerateRequest(
            request_id=client.next_request_id(),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
        )
    )


async def collect(stream):
    events = []
    async for batch in stream:
        events += batch
    return events


def expected_tokens(prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run(coroutine):
    asyncio.run(asyncio.wait_for(coroutine, 100))


def test_a_request_gets_its_tokens_and_one_finish_reason():
    async def scenario():
        async with running() as client:
            events = await collect(submit(client, [1, 2, 3]))

        assert [e.token_id for e in events] == expected_tokens([1, 2, 3], 8)
        assert [e.finish_reason for e in events] == [None] * 7 + [FinishReason.LENGTH]

    run(scenario())


def test_concurrent_requests_do_not_mix():
    async def scenario():
        async with running() as client:
            prompts = [[i, i + 1, i + 2] for i in range(50)]
            answers = await asyncio.gather(*(collect(submit(client, p, 20)) for p in prompts))

        for prompt, events in zip(prompts, answers, strict=True):
            assert [e.token_id for e in events] == expected_tokens(prompt, 20)

    run(scenario())


def test_a_front_end_that_was_busy_for_many_steps_gets_all_their_events():
    async def scenario():
        async with running() as client:
            batches = []
            task = asyncio.ensure_future(
                submit(client, [1, 2, 3], 400).follow(lambda e: batches.append(e) or True)
            )
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251 - blocks the event loop on purpose
            await task

        events = [event for batch in batches for event in batch]
        assert [e.token_id for e in events] == expected_tokens([1, 2, 3], 400)
        assert max(map(len, batches)) > 10

    run(scenario())


def target(*external_ids, client=None):
    return AbortTarget(frozenset(external_ids), client)


def test_requests_are_aborted_by_their_external_ids():
    async def scenario():
        async with running("slow") as client:
            streams = {
                name: client.submit(
                    GenerateRequest(
                        request_id=client.next_request_id(),
                        prompt_token_ids=[5, 6],
                        sampling=SamplingParams(max_new_tokens=400),
                        external_id=name.rstrip("12"),
                    )
                )
                for name in ("twice1", "twice2", "once", "")
            }
            other = target("twice", "once", client="another")
            assert await client.abort_external(other) == set()
            assert await client.abort_external(target("twice", "unknown")) == {"twice"}
            for name in ("twice1", "twice2"):
                assert (await collect(streams[name]))[-1].finish_reason is FinishReason.ABORT
            await anext(streams["once"])

            assert await client.abort_external(AbortTarget()) == {"once"}
            assert await client.abort_external(target("once")) == set()
            await anext(streams[""])  # it has no id to be aborted by
            streams[""].abort()
            await reached(lambda: client.stats.num_free_blocks == client.stats.num_blocks)

    run(scenario())


def test_an_aborted_request_frees_its_blocks_and_others_continue():
    async def scenario():
        async with running("slow") as client:
            other = asyncio.ensure_future(collect(submit(client, [9], 10)))
            stream = submit(client, [5, 6], 400)
            await anext(stream)
            stream.abort()
            stream.abort()

            assert (await collect(stream))[-1].finish_reason is FinishReason.ABORT
            assert len(await other) == 10
            await reached(lambda: client.stats.num_free_blocks == client.stats.num_blocks)
            assert client.stats.num_running == client.stats.num_waiting == 0

    run(scenario())


def test_a_killed_engine_ends_every_stream_with_an_error_and_is_restarted():
    async def scenario():
        async with running("slow") as client:
            streams = [submit(client, [i], 400) for i in range(16)]
            for stream in streams:
                await anext(stream)
            os.kill(client.engines[0]._child.process.pid, signal.SIGKILL)
            ends = await asyncio.gather(*(collect(s) for s in streams))

            assert {events[-1].finish_reason for events in ends} == {FinishReason.ERROR}
            assert client.state is EngineState.RESTARTING
            with pytest.raises(EngineUnavailableError, match="restarting"):
                submit(client, [1])
            await reached(lambda: client.state is EngineState.READY)
            assert client.restarts == 1
            assert len(await collect(submit(client, [1], 3))) == 3

    run(scenario())


def test_requests_without_output_are_generated_by_the_restarted_engine():
    async def scenario():
        async with running() as client:
            client.restart_queue.seconds = 60.0
            process = client.engines[0]._child.process.pid
            os.kill(process, signal.SIGSTOP)
            lost = submit(client, [1, 2, 3])
            os.kill(process, signal.SIGKILL)
            await reached(lambda: client.state is EngineState.RESTARTING)
            late = submit(client, [4, 5])
            events = [await collect(lost), await collect(late)]

        tokens = [[event.token_id for event in part] for part in events]
        assert tokens == [expected_tokens([1, 2, 3], 8), expected_tokens([4, 5], 8)]

    run(scenario())


def test_an_idle_engine_is_not_treated_as_hung():
    async def scenario():
        async with running(hang_seconds=2.0) as client:
            client.engines[0].hang_seconds = 0.8  # shorter than a start on a busy machine
            await asyncio.sleep(1.2)

            assert client.restarts == 0
            assert client.state is EngineState.READY

    run(scenario())


@pytest.mark.parametrize(
    ("behaviour", "message"), [("fail", "shard 2 is truncated"), ("crash", "ended with code 7")]
)
def test_a_failed_first_start_reports_the_reason_and_is_not_repeated(behaviour, message):
    async def scenario():
        async with running(behaviour, ready=False) as client:
            with pytest.raises(ChildStartError, match=message):
                await client.wait_until_ready()
            await reached(lambda: client.state is EngineState.STOPPED)
            assert client.restarts == 0

    run(scenario())


def test_a_step_that_raises_ends_only_its_requests():
    async def scenario():
        async with running() as client:
            poison = await collect(submit(client, [666]))
            healthy = await collect(submit(client, [1, 2], 5))

            assert poison[-1].finish_reason is FinishReason.ERROR
            assert poison[-1].error == "the forward pass failed"
            assert [e.token_id for e in healthy] == expected_tokens([1, 2], 5)
            assert client.restarts == 0
            assert client.stats.num_free_blocks == client.stats.num_blocks

    run(scenario())


def test_a_request_that_can_never_fit_gets_an_error_with_both_numbers():
    async def scenario():
        async with running() as client:
            events = await collect(submit(client, [1] * 500, 100))

            assert events[-1].finish_reason is FinishReason.ERROR
            assert "600" in events[-1].error
            assert "512" in events[-1].error

    run(scenario())


def test_requests_before_the_engine_is_ready_are_refused_with_the_phase():
    async def scenario():
        async with running(ready=False) as client:
            with pytest.raises(EngineUnavailableError, match="starting"):
                submit(client, [1])
            await client.wait_until_ready()

    run(scenario())


def test_stopping_ends_streams_and_leaves_no_process_and_no_descriptor():
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    async def scenario():
        before = descriptors()
        async with running("slow") as client:
            stream = submit(client, [1], 400)
            await anext(stream)
            process = client.engines[0]._child.process

        assert (await collect(stream))[-1].finish_reason is FinishReason.ERROR
        assert process.poll() is not None
        assert descriptors() == before

    run(scenario())


def test_the_engine_ends_when_its_front_end_dies():
    script = (
        "import asyncio, sys\n"
        "from server.engine.link.front_end.client import EngineClient\n"
        "from server.engine.core.messages import EngineConfig\n"
        "async def main():\n"
        "    config = EngineConfig(model_path='ok', model_id='fake')\n"
        f"    client = EngineClient(config, 60.0, {COMMAND!r})\n"
        "    await client.start()\n"
        "    await client.wait_until_ready()\n"
        "    print(client.engines[0]._child.process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )

    async def scenario():
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
        )
        pid = int(await parent.stdout.readline())
        parent.kill()
        await parent.wait()

        await reached(lambda: not Path(f"/proc/{pid}").exists())

    run(scenario())


def test_a_failed_relaunch_of_the_engine_is_retried(monkeypatch):
    async def scenario():
        async with running() as client:
            launch, attempts = client.engines[0]._child.launch, []

            def failing():
                attempts.append(1)
                if len(attempts) < 3:
                    raise ChildStartError("no memory to fork")
                launch()

            monkeypatch.setattr(client.engines[0]._child, "launch", failing)
            client.engines[0]._child.process.kill()
            await reached(lambda: len(attempts) == 3 and client.state is EngineState.READY)

            assert len(await collect(submit(client, [1], 3))) == 3

    run(scenario())


def test_an_engine_that_cannot_be_started_again_is_given_up_with_the_reason(monkeypatch):
    monkeypatch.setattr("server.engine.link.child_process.MOST_FAILURES", 2)

    async def scenario():
        async with running() as client:
            engine = client.engines[0]
            client.restart_queue.seconds = 60.0
            engine.config = dataclasses.replace(engine.config, model_path="fail")
            engine._child.process.kill()
            await reached(lambda: client.state is EngineState.RESTARTING)
            waiting = asyncio.create_task(collect(submit(client, [1], 3)))

            reason = await client.failed

            assert reason == "the engine could not be started again: shard 2 is truncated"
            assert client.state is EngineState.STOPPED
            assert (await waiting)[-1].finish_reason is FinishReason.ERROR
            assert engine._child.process is None
            with pytest.raises(EngineUnavailableError, match="could not be started again"):
                submit(client, [1])

    run(scenario())


def test_an_engine_that_starts_again_is_not_given_up(monkeypatch):
    monkeypatch.setattr("server.engine.link.child_process.MOST_FAILURES", 1)

    async def scenario():
        async with running() as client:
            for restarts in (1, 2, 3):
                client.engines[0]._child.process.kill()
                await reached(
                    lambda n=restarts: (
                        client.reports[0].restarts == n and client.state is EngineState.READY
                    )
                )
            assert not client.failed.done()

    run(scenario())


def test_a_process_spawned_earlier_is_used_only_for_the_first_engine():
    async def scenario():
        ahead = spawn(COMMAND)
        config = EngineConfig(model_path="ok", model_id="fake")
        client = EngineClient(config, 60.0, COMMAND, ahead)
        await client.start()
        try:
            await client.wait_until_ready()
            assert client.engines[0]._child.process is ahead

            ahead.kill()
            await reached(lambda: client.restarts == 1 and client.state is EngineState.READY)
            assert client.engines[0]._child.process is not ahead
        finally:
            await client.stop()

    run(scenario())


def test_an_engine_that_hangs_during_its_first_start_is_not_restarted():
    async def scenario():
        async with running("sleep", hang_seconds=0.05, ready=False) as client:
            with pytest.raises(ChildStartError, match="while starting"):
                await client.wait_until_ready()

    run(scenario())


def test_an_engine_that_hangs_during_a_restart_is_restarted():
    async def scenario():
        async with running(hang_seconds=2.0) as client:
            client.engines[0].hang_seconds = 0.05
            ok, client.engines[0].config = (
                client.engines[0].config,
                dataclasses.replace(client.engines[0].config, model_path="sleep"),
            )
            client.engines[0]._child.process.kill()
            await reached(lambda: client.restarts == 2)
            client.engines[0].config, client.engines[0].hang_seconds = ok, 2.0
            await reached(lambda: client.state is EngineState.READY)

    run(scenario())


def test_a_message_that_cannot_be_decoded_ends_the_engine_process():
    async def scenario():
        async with running("garbage", ready=False) as client:
            with pytest.raises(ChildStartError, match="ended with code -9"):
                await client.wait_until_ready()

    run(scenario())


def test_an_unrecoverable_error_ends_the_engine_process():
    async def scenario():
        async with running() as client:
            events = await collect(submit(client, [667]))

            assert events[-1].finish_reason is FinishReason.ERROR
            await reached(lambda: client.restarts == 1 and client.state is EngineState.READY)
            assert len(await collect(submit(client, [1], 3))) == 3

    run(scenario())


def test_the_gauges_of_a_dead_engine_are_reset_and_its_counters_stay():
    async def scenario():
        async with running("slow") as client:
            stream = submit(client, [1, 2, 3], 400)
            await anext(stream)
            client.engines[0]._child.process.kill()
            await reached(lambda: client.state is EngineState.RESTARTING)

            assert client.stats.num_running == 0
            assert client.stats.kv_usage == 0.0
            assert client.stats.num_free_blocks == client.stats.num_blocks
            assert client.stats.prompt_tokens == 3

    run(scenario())


def test_stopping_before_the_engine_is_ready_does_not_wait_for_it():
    async def scenario():
        async with running("sleep", ready=False) as client:
            process = client.engines[0]._child.process

        assert process.poll() not in (None, 0)  # it would sleep for an hour

    run(scenario())


def test_a_socket_that_the_system_refuses_is_a_start_error(monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, "too many open files")

    client = EngineClient(EngineConfig(model_path="ok", model_id="fake"), command=COMMAND)
    monkeypatch.setattr("socket.socketpair", refuse)
    with pytest.raises(ChildStartError, match="too many open files"):
        client.launch()
    client.kill()


def test_a_duplicate_id_is_refused_and_the_original_continues():
    async def scenario():
        async with running("slow") as client:
            first = submit(client, [1, 2], 10)
            await anext(first)
            client._send(
                GenerateRequest(
                    request_id=first.request_id,
                    prompt_token_ids=[1],
                    sampling=SamplingParams(max_new_tokens=1),
                )
            )
            await collect(first)
            await asyncio.sleep(0.1)

            assert client.restarts == 0
            assert len(await collect(submit(client, [1], 3))) == 3

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa4type\xa4ste\xff",  # not UTF-8
        msgspec.msgpack.encode(StepMessage(request_ids=[1], token_ids=[5], finish_reasons=[])),
        msgspec.msgpack.encode(StepMessage(request_ids=[1], token_ids=[5], finish_reasons=[-1])),
    ],
    ids=["not UTF-8", "columns of different lengths", "unknown finish reason"],
)
def test_an_engine_that_sends_nonsense_is_replaced_and_its_requests_end(data):
    async def scenario():
        async with running("slow") as client:
            stream = submit(client, [1, 2, 3], 400)
            assert stream.request_id == 1

            client.engines[0]._on_messages([data])

            events = await collect(stream)
            assert events[-1].finish_reason is FinishReason.ERROR
            assert client.state is EngineState.RESTARTING

    run(scenario())
