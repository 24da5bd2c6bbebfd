"""Several engine processes under one client, and under a hub with several front ends; the engines are fake."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
from pathlib import Path

import pytest

from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.link.child_process import ChildStartError
from server.engine.link.front_end.client import EngineClient, EngineUnavailableError, RemoteEngine
from server.engine.link.front_end.hub import EngineHub
from server.engine.link.protocol import AbortTarget, EngineState
from tests.engine.link.front_end.test_client import (
    COMMAND,
    collect,
    expected_tokens,
    run,
    submit,
)
from tests.waiting import reached

CONFIG = EngineConfig(model_path="slow", model_id="fake", block_size=4)
FAST = EngineConfig(model_path="ok", model_id="fake", block_size=4)
ENGINES = 2


@contextlib.asynccontextmanager
async def direct(config, environments):
    client = EngineClient(config, 60.0, COMMAND, environments=environments)
    await client.start()
    try:
        await client.wait_until_ready()
        yield client, client
    finally:
        await client.stop()


@contextlib.asynccontextmanager
async def through_a_hub(config, environments):
    hub = EngineHub(config, 60.0, COMMAND, environments=environments)
    await hub.start()
    try:
        await hub.wait_until_ready()
        ours, theirs = socket.socketpair()
        connection = hub.connect(ours.detach(), lambda: None, lambda _: None)
        remote = RemoteEngine(theirs.detach(), connection.first_id)
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(remote.stop)
            await remote.start()
            await reached(lambda: remote.state is EngineState.READY)
            yield remote, hub
    finally:
        await hub.stop()


@pytest.fixture(params=[direct, through_a_hub])
def running(request):
    """Starts engines; yields what a front end submits requests to, and the owner of the engines."""
    return lambda config=FAST, engines=ENGINES: request.param(config, ({},) * engines)


def kill(owner, engine):
    os.kill(owner.engines[engine]._child.process.pid, signal.SIGKILL)


def variables(pid):
    """Return the environment of a process."""
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def engines_of(owner):
    """Return the number of requests in flight of each engine."""
    return owner._loads()


@pytest.mark.parametrize("engines", [2, 4])
def test_requests_are_divided_and_have_the_replies_of_a_single_engine(running, engines):
    async def scenario():
        async with running(CONFIG, engines) as (front_end, owner):
            prompts = [[i, i + 1, i + 2] for i in range(3 * engines)]
            streams = [submit(front_end, prompt, 6) for prompt in prompts]
            await reached(lambda: sum(engines_of(owner)) == len(streams))
            assert engines_of(owner) == [3] * engines
            replies = await asyncio.gather(*map(collect, streams))

            for prompt, events in zip(prompts, replies, strict=True):
                assert [e.token_id for e in events] == expected_tokens(prompt, 6)
            assert engines_of(owner) == [0] * engines
            await reached(lambda: front_end.stats.generation_tokens == 6 * len(streams))
            assert front_end.stats.num_blocks == front_end.info.num_blocks == 256 * engines
            assert {report.stats.engine for report in front_end.reports} == set(range(engines))

    run(scenario())


def test_a_prompt_goes_where_its_prefix_is_cached(running):
    async def scenario():
        async with running() as (front_end, owner):
            prompts = [[i] * 40 for i in range(1, 7)]
            for _ in range(3):
                for prompt in prompts:
                    await collect(submit(front_end, prompt, 2))
            await reached(lambda: front_end.stats.prompt_tokens == 18 * 40)

            hits = [report.stats.prefix_cache_hit_tokens for report in owner.reports]
            assert sum(hits) == 12 * 36  # the last block is computed
            assert hits[0] == hits[1]

    run(scenario())


def test_a_killed_engine_ends_only_its_own_streams_and_comes_back(running):
    async def scenario():
        async with running(CONFIG) as (front_end, owner):
            streams = [submit(front_end, [i], 60) for i in range(4)]
            for stream in streams:
                await anext(stream)
            kill(owner, 0)
            ends = [(await collect(stream))[-1] for stream in streams]
            assert front_end.restarts == owner.reports[0].restarts == 1
            assert front_end.state is EngineState.READY

            reasons = [end.finish_reason for end in ends]
            assert sorted(reasons) == sorted([FinishReason.LENGTH] * 2 + [FinishReason.ERROR] * 2)
            errors = {end.error for end in ends if end.error}
            assert errors == {"the engine stopped unexpectedly and is being started again"}
            await reached(lambda: front_end.num_ready == 2)
            assert front_end.phase == "ready"

    run(scenario())


def test_while_an_engine_is_away_the_other_takes_all_requests(running):
    async def scenario():
        async with running(CONFIG) as (front_end, owner):
            owner.engines[0]._child._backoff = 1.0
            kill(owner, 0)
            await reached(lambda: front_end.num_ready == 1)
            assert front_end.phase.startswith("1 of 2 engines are ready; engine 0: starting again")
            streams = [submit(front_end, [i], 3) for i in range(4)]
            await reached(lambda: sum(engines_of(owner)) == 4)
            assert engines_of(owner) == [0, 4]
            for i, stream in enumerate(streams):
                assert [e.token_id for e in await collect(stream)] == expected_tokens([i], 3)

    run(scenario())


def test_lost_requests_without_output_go_to_the_other_engine(running):
    async def scenario():
        async with running(CONFIG) as (front_end, owner):
            front_end.restart_queue.seconds = 10.0
            long = [
                submit(front_end, [670, i], 3) for i in range(2)
            ]  # half a second to the first token
            await reached(lambda: engines_of(owner) == [1, 1])
            owner.engines[0]._child._backoff = 5.0
            kill(owner, 0)
            replies = await asyncio.gather(*map(collect, long))

            for i, events in enumerate(replies):
                assert [e.token_id for e in events] == expected_tokens([670, i], 3)
            assert front_end.num_ready == 1

    run(scenario())


def test_requests_wait_if_no_engine_is_left_and_are_refused_without_a_wait(running):
    async def scenario():
        async with running(CONFIG) as (front_end, owner):
            front_end.restart_queue.seconds = 20.0
            for engine in range(ENGINES):
                kill(owner, engine)
            await reached(lambda: front_end.state is EngineState.RESTARTING)
            waiting = submit(front_end, [1], 3)
            front_end.restart_queue.seconds = 0.0
            with pytest.raises(EngineUnavailableError, match="the engine is restarting"):
                submit(front_end, [1], 3)

            assert [e.token_id for e in await collect(waiting)] == expected_tokens([1], 3)
            assert front_end.restarts >= 1

    run(scenario())


def test_aborts_reach_the_engine_that_has_the_request(running):
    async def scenario():
        async with running(CONFIG) as (front_end, owner):
            streams = [submit(front_end, [i], 400) for i in range(4)]
            await reached(lambda: front_end.stats.num_running == 4)
            streams[0].abort()
            streams[1].abort()
            await reached(lambda: front_end.stats.num_running == 2)
            assert engines_of(owner) == [1, 1]
            streams[2].stop()
            streams[3].stop()
            for stream in streams[2:]:
                assert (await collect(stream))[-1].finish_reason is FinishReason.STOP
            assert engines_of(owner) == [0, 0]
            await reached(lambda: front_end.stats.num_free_blocks == front_end.stats.num_blocks)

    run(scenario())


def test_requests_on_all_engines_are_aborted_by_their_external_ids(running):
    async def scenario():
        async with running(CONFIG) as (front_end, owner):
            streams = [
                front_end.submit(
                    GenerateRequest(
                        request_id=front_end.next_request_id(),
                        prompt_token_ids=[i],
                        sampling=SamplingParams(max_new_tokens=400),
                        external_id=f"job {i}",
                    )
                )
                for i in range(4)
            ]
            await reached(lambda: sum(engines_of(owner)) == 4)
            target = AbortTarget(frozenset({"job 0", "job 1", "nobody"}))
            assert await front_end.abort_external(target) == {"job 0", "job 1"}
            assert await front_end.abort_external(AbortTarget()) == {"job 2", "job 3"}
            for stream in streams:
                assert (await collect(stream))[-1].finish_reason is FinishReason.ABORT
            await reached(lambda: front_end.stats.num_running == 0)

    run(scenario())


def test_stopping_ends_all_engines_and_requests_with_one_reason(running):
    async def scenario():
        async with running(CONFIG) as (front_end, owner):
            front_end.restart_queue.seconds = 10.0
            streams = [submit(front_end, [i], 400) for i in range(4)]
            await reached(lambda: sum(engines_of(owner)) == 4)
            processes = [engine._child.process for engine in owner.engines]
            await owner.stop()
            ends = [(await collect(stream))[-1] for stream in streams]

            assert {end.error for end in ends} == {"the server is shutting down"}
            assert all(process.poll() is not None for process in processes)

    run(scenario())


def test_the_first_engine_that_cannot_start_is_named():
    async def scenario():
        config = EngineConfig(model_path="fail", model_id="fake")
        client = EngineClient(config, 60.0, COMMAND, environments=({}, {}))
        await client.start()
        try:
            with pytest.raises(ChildStartError, match=r"engine [01]: shard 2 is truncated"):
                await client.wait_until_ready()
            assert client.state is not EngineState.READY
        finally:
            await client.stop()

    run(scenario())


def test_each_engine_has_its_own_environment():
    async def scenario():
        environments = ({"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"})
        async with direct(FAST, environments) as (client, _):
            for engine, expected in zip(client.engines, environments, strict=True):
                found = variables(engine._child.process.pid)
                assert found["CUDA_VISIBLE_DEVICES"] == expected["CUDA_VISIBLE_DEVICES"]

    run(scenario())


def test_engines_are_given_up_only_together(running, monkeypatch):
    monkeypatch.setattr("server.engine.link.child_process.MOST_FAILURES", 1)

    async def scenario():
        async with running() as (front_end, owner):
            broken, other = owner.engines
            broken.config = dataclasses.replace(broken.config, model_path="fail")
            kill(owner, 0)
            await reached(lambda: broken.is_hopeless)
            assert not owner.failed.done()
            assert len(await collect(submit(front_end, [1], 3))) == 3

            other.config = broken.config
            kill(owner, 1)

            assert "could not be started again: shard 2 is truncated" in await owner.failed
            await reached(lambda: front_end.state is EngineState.STOPPED)

    run(scenario())
