"""Hung engine processes are noticed, logged with their stacks and replaced; slow and paused ones are not."""

import asyncio
import os
import signal
import time

import pytest

from server.engine.core.request import FinishReason
from server.engine.link.child_process import ChildStartError
from server.engine.link.engine_process.watchdog import HANG_EXIT_CODE
from server.engine.link.front_end.client import EngineUnavailableError
from server.engine.link.protocol import EngineState
from tests.control import Control
from tests.engine.link.front_end.test_client import collect, run, running, submit
from tests.waiting import reached


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        pytest.param(668, "it has been launching a step of 2 tokens for", id="step"),
        pytest.param(
            669, "the engine has been silent for", id="with the global lock", marks=pytest.mark.slow
        ),
    ],
)
def test_a_step_that_never_ends_is_noticed_logged_and_replaced(capfd, caplog, token, reason):
    async def scenario():
        async with running(hang_seconds=1.0) as client:
            assert len(await collect(submit(client, [1, 2], 3))) == 3
            process = client.engines[0]._child.process
            events = await collect(submit(client, [1, token]))

            assert events[-1].finish_reason is FinishReason.ERROR
            assert client.state is EngineState.RESTARTING  # before the process has ended
            with pytest.raises(EngineUnavailableError):
                submit(client, [1])
            await reached(lambda: client.state is EngineState.READY)
            assert client.restarts == 1
            assert process.returncode == (HANG_EXIT_CODE if token == 668 else -signal.SIGKILL)
            assert len(await collect(submit(client, [1, 2], 3))) == 3

    run(scenario())

    log = capfd.readouterr().err + caplog.text
    assert reason in log
    assert 'fake_engine.py", line' in log  # the stack of the thread that hangs
    assert "in launch" in log


def test_a_step_that_is_slower_than_the_limit_but_usually_so_is_no_hang():
    async def scenario():
        async with running(hang_seconds=0.4) as client:
            events = await collect(
                submit(client, [670], 2)
            )  # the first step has ten times the limit

            assert len(events) == 2
            assert client.restarts == 0

    run(scenario())


def test_an_engine_that_never_reads_a_request_is_replaced(caplog):
    async def scenario():
        async with running("deaf", hang_seconds=0.6) as client:
            events = await collect(submit(client, [1]))

            assert events[-1].finish_reason is FinishReason.ERROR
            await reached(lambda: client.restarts == 1)

    run(scenario())

    assert "idle for" in caplog.text


def test_a_first_start_that_hangs_with_the_global_lock_is_a_start_error():
    async def scenario():
        async with running("silent", hang_seconds=0.05, ready=False) as client:
            with pytest.raises(ChildStartError, match="while starting: it has been silent"):
                await client.wait_until_ready()

    run(scenario())


@pytest.mark.parametrize("has_request", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_stopped_engine_is_replaced_whether_it_has_requests_or_not(has_request):
    async def scenario():
        async with running("slow", hang_seconds=0.8) as client:
            await reached(lambda: client.engines[0]._beat)
            stream = submit(client, [1], 400) if has_request else None
            os.kill(client.engines[0]._child.process.pid, signal.SIGSTOP)
            if stream is not None:
                assert (await collect(stream))[-1].finish_reason is FinishReason.ERROR
            await reached(lambda: client.restarts == 1 and client.state is EngineState.READY)

    run(scenario())


@pytest.mark.slow
def test_an_engine_that_is_stopped_for_less_than_the_limit_goes_on():
    async def scenario():
        async with running("slow", hang_seconds=2.0) as client:
            stream = submit(client, [1], 30)
            await anext(stream)
            os.kill(client.engines[0]._child.process.pid, signal.SIGSTOP)
            await asyncio.sleep(1.0)
            os.kill(client.engines[0]._child.process.pid, signal.SIGCONT)

            assert (await collect(stream))[-1].finish_reason is FinishReason.LENGTH
            assert client.restarts == 0

    run(scenario())


@pytest.mark.slow
def test_a_blocked_event_loop_of_the_watcher_is_not_held_against_the_engine():
    async def scenario():
        async with running(hang_seconds=0.8) as client:
            for _ in range(2):
                time.sleep(1.5)  # noqa: ASYNC251 - blocks the event loop on purpose
                await asyncio.sleep(0.05)
            assert len(await collect(submit(client, [1, 2], 3))) == 3
            assert client.restarts == 0

    run(scenario())


def test_a_killed_engine_is_noticed_within_a_second():
    async def scenario():
        async with running() as client:
            with Control() as control:
                os.kill(client.engines[0]._child.process.pid, signal.SIGKILL)
                killed = time.monotonic()
                await reached(lambda: client.state is EngineState.RESTARTING)
                seconds = time.monotonic() - killed

            assert seconds < control.allowed(1.0)

    run(scenario())


def test_a_hung_process_that_cannot_be_killed_makes_the_service_fail(monkeypatch):
    monkeypatch.setattr("server.engine.link.engine_process.supervisor._KILL_SECONDS", 0.2)

    async def scenario():
        async with running(hang_seconds=0.8) as client:
            await reached(lambda: client.engines[0]._beat)
            monkeypatch.setattr(client.engines[0]._child, "kill_after", lambda seconds: None)
            os.kill(client.engines[0]._child.process.pid, signal.SIGSTOP)
            await reached(lambda: client.state is EngineState.STOPPED)
            assert "cannot be ended" in client.phase

    run(scenario())
