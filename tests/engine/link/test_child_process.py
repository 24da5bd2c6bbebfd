"""Supervision of a child process: configuration, restarts and stopping."""

import asyncio
import signal
import sys
import threading
import time

import pytest

from server.engine.link import child_process
from server.engine.link.child_process import ChildProcess, ChildStartError
from server.engine.link.spawn import end, spawn
from tests.waiting import GIVE_UP, reached

SLEEP = ("sleep", "60")


class Child:
    """A `ChildProcess` and the calls of its callbacks."""

    def __init__(self, command, restarts=0):
        self.launched = []
        self.codes = []
        self.restarts = restarts
        self.failures = []
        self.process = ChildProcess(
            "child", command, self.configure, self.on_exit, on_failure=self.failures.append
        )

    def configure(self, _process):
        self.launched.append(time.monotonic())
        return b"configuration"

    def on_exit(self, code):
        self.codes.append(code)
        return len(self.codes) <= self.restarts


def run(coroutine):
    asyncio.run(asyncio.wait_for(coroutine, 100))


def test_the_process_reads_its_configuration_and_its_input_stays_open(tmp_path):
    async def scenario():
        target = tmp_path / "line"
        child = Child(("sh", "-c", f"read line; echo $line > {target}; read more; exit 5"))
        child.process.start()
        await reached(lambda: target.exists() and target.read_text() == "configuration\n")
        await asyncio.sleep(0.1)
        assert child.codes == []

        child.process.process.stdin.close()
        await reached(lambda: child.codes == [5])
        assert child.process.process is None

    run(scenario())


def test_a_process_that_keeps_ending_is_restarted_with_growing_delays():
    async def scenario():
        child = Child(("false",), restarts=3)
        child.process.start()
        await reached(lambda: len(child.codes) == 4)
        await asyncio.sleep(0.1)

        assert child.codes == [1] * 4
        gaps = [b - a for a, b in zip(child.launched, child.launched[1:], strict=False)]
        assert [gap >= delay for gap, delay in zip(gaps, (0.1, 0.2, 0.4), strict=True)] == [
            True
        ] * 3

    run(scenario())


def test_failures_in_sequence_make_a_process_hopeless_until_it_reports_success(tmp_path):
    async def scenario():
        program = tmp_path / "program"
        program.write_text("#!/bin/sh\nexec sleep 60\n")
        program.chmod(0o755)
        child = Child((str(program),), restarts=100)
        child.process.start()
        program.unlink()
        child.process.process.kill()
        await reached(lambda: len(child.failures) == 3)

        assert child.failures[0] == "the child ended with code -9"
        assert "the child cannot be started" in child.failures[1]
        assert child.process.num_failures == 3
        assert not child.process.is_hopeless
        child.process.num_failures = child_process.MOST_FAILURES
        await reached(lambda: child.process.is_hopeless)
        child.process.report_success()
        assert not child.process.is_hopeless
        child.process.kill()

    run(scenario())


def test_a_restart_that_the_operating_system_refuses_is_tried_again(monkeypatch):
    async def scenario():
        child = Child(SLEEP, restarts=1)
        child.process.start()
        configure, attempts = child.process._configure, []

        def fails_twice(started):
            attempts.append(1)
            if len(attempts) < 3:
                raise OSError("no descriptors")
            return configure(started)

        monkeypatch.setattr(child.process, "_configure", fails_twice)
        child.process.process.kill()
        await reached(lambda: len(attempts) == 3 and child.process.process is not None)
        child.process.kill()

        assert child.codes == [-signal.SIGKILL]

    run(scenario())


def test_a_first_launch_that_fails_leaves_no_process():
    ahead = spawn(SLEEP)

    def refuse(_process):
        raise OSError("no descriptors")

    child = ChildProcess("child", SLEEP, refuse, bool, spawned=ahead)
    with pytest.raises(ChildStartError, match="the child cannot be started: no descriptors"):
        child.launch()
    assert child.process is None
    assert ahead.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("seconds", "number", "code"),
    [(0.1, None, -signal.SIGKILL), (20, signal.SIGTERM, -signal.SIGTERM)],
)
def test_stopping_sends_the_signal_and_kills_the_process_after_the_timeout(seconds, number, code):
    async def scenario():
        child = Child(SLEEP, restarts=1)
        child.process.start()
        process = child.process.process
        await child.process.stop(seconds, number)

        assert process.returncode == code
        assert child.codes == []

    run(scenario())


def test_killing_ends_a_pending_stop():
    async def scenario():
        child = Child(SLEEP)
        child.process.start()
        stop = asyncio.ensure_future(child.process.stop(30))
        await asyncio.sleep(0)
        child.process.kill()
        await asyncio.wait_for(stop, GIVE_UP)

    run(scenario())


def test_no_restart_follows_a_stop():
    async def scenario():
        child = Child(("false",), restarts=1)
        child.process.start()
        await reached(lambda: child.codes)
        await child.process.stop(1)
        await asyncio.sleep(0.2)

        assert len(child.launched) == 1

    run(scenario())


def test_an_interrupt_of_the_process_group_does_not_end_a_child_that_starts():
    child = spawn((sys.executable, "-c", "import sys; sys.stdin.read(); print('done')"))
    try:
        child.send_signal(signal.SIGINT)
        child.stdin.close()
        assert child.wait(timeout=GIVE_UP) == 0
    finally:
        end(child)


def test_the_parent_still_gets_interrupts_after_it_has_started_a_child():
    end(spawn(SLEEP))

    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_children_do_not_import_from_the_working_directory():
    script = "import sys; sys.exit(not sys.flags.safe_path or '' in sys.path)"
    child = spawn((sys.executable, "-c", script))
    try:
        assert child.wait(timeout=GIVE_UP) == 0
    finally:
        end(child)


def test_stopping_does_not_wait_for_a_process_that_cannot_be_killed(monkeypatch, caplog):
    monkeypatch.setattr(child_process, "KILLED_SECONDS", 0.2)

    async def scenario():
        child = Child(SLEEP)
        child.process.start()
        process = child.process.process
        kill, process.kill = process.kill, lambda: None
        try:
            await child.process.stop(0.1)
        finally:
            kill()
        assert f"the child {process.pid} cannot be killed" in caplog.text
        await asyncio.to_thread(process.wait)
        process.stdin.close()

    run(scenario())


def test_the_end_of_a_process_is_noticed_although_the_system_refuses_the_thread_for_it(monkeypatch):
    async def scenario():
        child = Child(("false",), restarts=2)

        def refuse(_):
            raise RuntimeError("can't start new thread")

        child.process.launch()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        child.process.start()
        await reached(lambda: child.codes)
        monkeypatch.undo()
        await reached(lambda: child.codes == [1] * 3)

    run(scenario())
