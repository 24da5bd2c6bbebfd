"""A process that does tasks: which ends are due to a task, and that every wait has an end."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from server.http.text import helper_process
from server.http.text.helper_process import (
    CrashError,
    HelperProcess,
    LostError,
    ProcessorTimeError,
    end_processes,
)
from tests.http.text import toy_helper
from tests.waiting import reached

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, "-I", "-S", toy_helper.__file__)


@pytest.fixture
async def running(anyio_backend):
    found = {}
    yield found
    end_processes(found)


def helper(running, config="ready", command=COMMAND, seconds=toy_helper.SECONDS):
    return HelperProcess(command, json.dumps(config).encode(), seconds, running)


async def started(running, **changes):
    made = helper(running, **changes)
    await made.start()
    return made


async def ask(made, task):
    return json.loads(bytes(await made.ask(json.dumps(task).encode())))


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_process_answers_tasks_of_any_size_in_turn(running):
    made = await started(running)
    large = "x" * 5_000_000

    answers = [await ask(made, task) for task in ("a", large, "b")]

    assert [answer["task"] for answer in answers] == ["a", large, "b"]
    assert {answer["pid"] for answer in answers} == {made.pid}
    assert made.is_usable


async def test_a_task_that_uses_up_its_processor_time_is_at_fault(running):
    made = await started(running)

    with pytest.raises(ProcessorTimeError):
        await ask(made, "spin")
    await reached(lambda: not running)
    assert not made.is_usable


async def test_a_signal_of_the_timer_that_somebody_else_sends_is_no_fault_of_the_task(running):
    made = await started(running)

    with pytest.raises(LostError, match="SIGPROF"):
        await ask(made, {"signal": signal.SIGPROF})


@pytest.mark.parametrize(
    "number",
    [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE],
    ids=lambda number: number.name,
)
async def test_a_crash_says_whether_the_process_had_done_other_tasks(running, number):
    for earlier in (0, 1):
        made = await started(running)
        for _ in range(earlier):
            await ask(made, "fine")
        with pytest.raises(CrashError, match=number.name) as error:
            await ask(made, {"signal": number})
        assert error.value.is_fresh == (not earlier)


async def test_an_error_of_the_program_during_a_task_is_a_crash(running):
    made = await started(running)

    with pytest.raises(CrashError, match="70"):
        await ask(made, {"exit": helper_process.TASK_FAILED})


@pytest.mark.parametrize(
    "task",
    [
        *({"signal": number} for number in (signal.SIGKILL, signal.SIGXCPU, signal.SIGALRM)),
        *({"signal": number} for number in (signal.SIGRTMIN, signal.SIGVTALRM)),
        *({"signal": number} for number in (signal.SIGBUS, signal.SIGUSR1)),
        {"exit": 0},
        {"exit": 1},
        {"exit": 71},
        "garbage",
    ],
    ids=str,
)
async def test_other_ends_say_nothing_about_the_task(running, task):
    made = await started(running)

    with pytest.raises(LostError):
        await ask(made, task)
    await reached(lambda: not running)


async def test_a_process_that_is_stopped_while_it_computes_is_given_up(running):
    made = await started(running)

    with pytest.raises(LostError, match="was stopped"):
        await ask(made, {"signal": signal.SIGSTOP})
    await reached(lambda: not running)


async def test_a_stopped_or_ended_process_that_waits_is_not_usable(running):
    stopped, ended = await started(running), await started(running)

    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(ended.pid, signal.SIGKILL)

    await reached(lambda: not stopped.is_usable)
    await reached(lambda: not ended.is_usable)


async def test_a_process_that_does_not_answer_is_given_up(running, monkeypatch):
    made = await started(running)
    monkeypatch.setattr(helper_process, "_SILENT_SECONDS", 0.5)

    with pytest.raises(LostError, match="no answer"):
        await ask(made, "wait")
    await reached(lambda: not running)


@pytest.mark.parametrize("config", ["fail", {"signal": signal.SIGKILL}, {"signal": 11}], ids=str)
async def test_an_end_before_the_first_task_is_no_crash(running, config):
    with pytest.raises(LostError, match="while it started"):
        await helper(running, config=config).start()
    await reached(lambda: not running)


async def test_a_process_that_is_stopped_while_it_starts_is_given_up(running):
    with pytest.raises(LostError, match="was stopped"):
        await helper(running, config={"signal": signal.SIGSTOP}).start()


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("subprocess.Popen", BlockingIOError("Resource temporarily unavailable")),
        ("subprocess.Popen", MemoryError()),
        ("socket.socketpair", OSError(24, "Too many open files")),
    ],
    ids=["fork", "memory", "descriptors"],
)
async def test_what_the_system_refuses_is_an_error_that_leaks_nothing(
    running, monkeypatch, name, error
):
    def refuse(*_, **__):
        raise error

    before = num_descriptors()
    monkeypatch.setattr(f"server.http.text.helper_process.{name}", refuse)
    with pytest.raises(LostError, match="cannot be started"):
        await helper(running).start()

    assert num_descriptors() == before
    assert not running


async def test_a_program_that_does_not_exist_is_an_error(running):
    with pytest.raises(LostError, match="cannot be started"):
        await helper(running, command=("/no/such/program",)).start()


async def test_a_caller_that_is_cancelled_ends_the_process(running):
    made = await started(running)
    asking = asyncio.ensure_future(ask(made, "wait"))
    await asyncio.sleep(0.02)

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await reached(lambda: not running)

    # The number of its descriptor is free again, and the event loop has forgotten it.
    assert (await ask(await started(running), "next"))["task"] == "next"


async def test_an_end_whose_code_somebody_else_took_is_no_crash(running):
    made = await started(running)

    async def take():
        pid = made.pid
        while True:
            await asyncio.sleep(0)
            if os.waitpid(pid, os.WNOHANG)[0]:  # noqa: ASYNC222 - does not block
                return

    taking = asyncio.ensure_future(take())
    with pytest.raises((LostError, CrashError)):
        await ask(made, {"signal": signal.SIGSEGV})
    taking.cancel()


async def test_all_processes_end_together_also_those_that_are_stopped(running):
    made = [await started(running) for _ in range(3)]
    os.kill(made[0].pid, signal.SIGSTOP)
    processes = list(running)

    end_processes(running)

    assert not running
    assert {process.returncode for process in processes} == {-signal.SIGKILL}
