"""A process that does tasks: which ends are due to a task, and that every wait has an end, in threads and on loops."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from model.helper_process import process
from model.helper_process.process import (
    TASK_FAILED,
    CrashError,
    HelperProcess,
    LostError,
    ProcessorTimeError,
)
from model.helper_process.steps import run_in_thread, run_on_loop
from tests.model.helper_process import toy_helper
from tests.waiting import reached

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, "-I", "-S", toy_helper.__file__)
SECONDS = 0.3


@pytest.fixture(params=["thread", "loop"])
def run(request):
    if request.param == "loop":
        return run_on_loop
    return lambda steps: asyncio.to_thread(run_in_thread, steps)


@pytest.fixture
async def helper(anyio_backend):
    found = []

    def make(config="ready", command=COMMAND):
        found.append(HelperProcess(command, json.dumps(config).encode()))
        return found[-1]

    yield make
    for it in found:
        it.wait_for_end()


@pytest.fixture
async def started(helper, run):
    async def one(**changes):
        made = helper(**changes)
        await run(made.start())
        return made

    return one


@pytest.fixture
def ask(run):
    async def one(made, task, seconds=SECONDS):
        return json.loads((await run(made.ask(json.dumps(task).encode(), seconds))).content)

    return one


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_process_answers_tasks_of_any_size_in_turn(started, ask):
    made = await started()
    large = "x" * 5_000_000

    answers = [await ask(made, task) for task in ("a", large, "b")]

    assert [answer["task"] for answer in answers] == ["a", large, "b"]
    assert {answer["pid"] for answer in answers} == {made.pid}
    assert made.is_usable


async def test_a_reply_says_what_processor_time_the_task_took(started, run):
    made = await started()

    assert (await run(made.ask(b'"a"', SECONDS))).seconds == 0.25


async def test_it_has_only_the_variables_and_files_that_it_is_given(started, ask, monkeypatch):
    monkeypatch.setenv("TESSERA_API_KEY", "secret")
    made = await started()

    assert "secret" not in json.dumps(await ask(made, "variables"))
    # The fourth is the folder that is listed.
    assert (await ask(made, "files"))["task"] == ["0", "1", "2", "3"]


async def test_a_task_that_uses_up_its_processor_time_is_at_fault(started, ask):
    made = await started()

    with pytest.raises(ProcessorTimeError):
        await ask(made, "spin")
    assert made.pid is None
    assert not made.is_usable


async def test_a_signal_of_the_timer_that_somebody_else_sends_is_no_fault_of_the_task(started, ask):
    made = await started()

    with pytest.raises(LostError, match="SIGPROF"):
        await ask(made, {"signal": signal.SIGPROF})


@pytest.mark.parametrize(
    "number",
    [signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE],
    ids=lambda number: number.name,
)
async def test_a_crash_is_an_error_that_names_the_signal(started, ask, number):
    made = await started()

    with pytest.raises(CrashError, match=number.name):
        await ask(made, {"signal": number})


async def test_an_error_of_the_program_during_a_task_is_a_crash(started, ask):
    made = await started()

    with pytest.raises(CrashError, match="70"):
        await ask(made, {"exit": TASK_FAILED})


@pytest.mark.parametrize(
    "task",
    [
        *({"signal": number} for number in (signal.SIGKILL, signal.SIGXCPU, signal.SIGALRM)),
        *({"signal": number} for number in (signal.SIGRTMIN, signal.SIGVTALRM)),
        *({"signal": number} for number in (signal.SIGBUS, signal.SIGUSR1)),
        {"exit": 0},
        {"exit": 1},
        {"exit": 71},
    ],
    ids=str,
)
async def test_other_ends_say_nothing_about_the_task(started, ask, task):
    made = await started()

    with pytest.raises(LostError):
        await ask(made, task)
    assert made.pid is None


async def test_the_last_line_of_standard_error_is_in_the_message(started, ask):
    made = await started()

    with pytest.raises(LostError, match=r"ended with code 3: the last one$"):
        await ask(made, {"exit": 3, "words": "one\nthe last one\n"})


async def test_more_standard_error_than_a_pipe_holds_stops_nothing(started, ask):
    made = await started()

    with pytest.raises(LostError, match="ended"):
        await ask(made, {"exit": 3, "words": "x" * 1_000_000})


async def test_a_reply_beyond_the_limit_is_not_read(started, ask, monkeypatch):
    made = await started()
    monkeypatch.setattr(process, "MOST_REPLY_BYTES", 100)

    with pytest.raises(LostError, match="something else"):
        await ask(made, "x" * 100)
    assert not made.is_usable


async def test_a_process_that_says_something_unasked_is_not_used(started, ask):
    made = await started()
    with contextlib.suppress(LostError):  # its true reply follows, maybe at once
        await ask(made, "garbage")

    await reached(lambda: not made.is_usable)


async def test_a_process_that_is_stopped_while_it_computes_is_given_up(started, ask):
    made = await started()

    with pytest.raises(LostError, match="was stopped"):
        await ask(made, {"signal": signal.SIGSTOP})


async def test_a_process_that_is_stopped_before_it_takes_a_large_task_is_given_up(started, ask):
    made = await started()
    os.kill(made.pid, signal.SIGSTOP)

    with pytest.raises(LostError, match="was stopped"):
        await ask(made, "x" * 10_000_000)  # more than the socket holds


async def test_a_stopped_or_ended_process_that_waits_is_not_usable(started):
    stopped, ended = await started(), await started()

    os.kill(stopped.pid, signal.SIGSTOP)
    os.kill(ended.pid, signal.SIGKILL)

    await reached(lambda: not stopped.is_usable)
    await reached(lambda: not ended.is_usable)


async def test_a_process_that_does_not_answer_is_given_up(started, ask, monkeypatch):
    made = await started()
    monkeypatch.setattr(process, "_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(process, "_SILENT_FACTOR", 0.0)

    with pytest.raises(LostError, match="no answer"):
        await ask(made, "wait")


@pytest.mark.parametrize("config", ["fail", {"signal": signal.SIGKILL}, {"signal": 11}], ids=str)
async def test_an_end_before_the_first_task_is_no_crash(helper, run, config):
    with pytest.raises(LostError, match="while it started"):
        await run(helper(config=config).start())


async def test_a_process_that_is_stopped_while_it_starts_is_given_up(helper, run):
    with pytest.raises(LostError, match="was stopped"):
        await run(helper(config={"signal": signal.SIGSTOP}).start())


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("subprocess.Popen", BlockingIOError("Resource temporarily unavailable")),
        ("subprocess.Popen", MemoryError()),
        ("socket.socketpair", OSError(24, "Too many open files")),
        ("os.pipe", OSError(24, "Too many open files")),
    ],
    ids=["fork", "memory", "descriptors", "pipes"],
)
async def test_what_the_system_refuses_is_an_error_that_leaks_nothing(
    helper, monkeypatch, name, error
):
    def refuse(*_, **__):
        raise error

    before = num_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(f"model.helper_process.process.{name}", refuse)
        with pytest.raises(LostError, match="cannot be started"):
            run_in_thread(helper().start())

    assert num_descriptors() == before


async def test_a_program_that_does_not_exist_is_an_error(helper, run):
    with pytest.raises(LostError, match="cannot be started"):
        await run(helper(command=("/no/such/program",)).start())


async def test_a_caller_that_is_cancelled_ends_the_process(helper):
    made = helper()
    await run_on_loop(made.start())
    asking = asyncio.ensure_future(run_on_loop(made.ask(b'"wait"', SECONDS)))
    await asyncio.sleep(0.02)

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert made.pid is None

    # The number of its descriptor is free again, and the event loop has forgotten it.
    after = helper()
    await run_on_loop(after.start())
    assert b"next" in (await run_on_loop(after.ask(b'"next"', SECONDS))).content


async def test_interrupting_it_wakes_whoever_waits_for_its_answer(started, ask):
    made = await started()
    asking = asyncio.ensure_future(ask(made, "wait"))
    await asyncio.sleep(0.02)

    made.interrupt()

    with pytest.raises(LostError, match="SIGKILL"):
        await asking


async def test_an_end_whose_code_somebody_else_took_is_an_error_too(started, ask):
    made = await started()
    pid = made.pid

    def take():
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    thread = threading.Thread(target=take)
    thread.start()
    with pytest.raises((LostError, CrashError)):
        await ask(made, {"signal": signal.SIGSEGV})
    thread.join(60)


async def test_a_process_ends_also_if_it_is_stopped(started):
    made = await started()
    pid = made.pid
    os.kill(pid, signal.SIGSTOP)

    made.wait_for_end()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("is_stopped", [False, True], ids=["waiting", "stopped"])
def test_a_process_ends_with_its_parent(is_stopped):
    code = (
        "import os, sys, time\n"
        "from model.helper_process.command import module_command\n"
        "from model.helper_process.process import HelperProcess\n"
        "from model.helper_process.steps import run_in_thread\n"
        "it = HelperProcess(module_command('model.text.rendering.worker')); run_in_thread(it.start())\n"
        "print(it.pid, flush=True)\n"
        f"if {is_stopped}: os.kill(it.pid, 19); os.waitid(os.P_PID, it.pid, os.WSTOPPED)\n"
        "os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    status = Path(f"/proc/{int(killed.stdout)}/stat")

    assert killed.returncode == -signal.SIGKILL
    while status.exists() and status.read_text().split()[2] != "Z":
        pass
