"""A watchdog logs the stacks and ends a process that hangs, even if its log cannot be written."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from server.engine.core.progress import Activity, Progress
from server.engine.link.engine_process import watchdog as watchdog_module
from server.engine.link.engine_process.watchdog import (
    HANG_EXIT_CODE,
    EngineWatch,
    LoopWatch,
    Watchdog,
)
from tests.waiting import GIVE_UP, until


class Watch:
    period = 0.005

    def __init__(self, *reasons):
        self.reasons = list(reasons)
        self.closed = False

    def check(self):
        return self.reasons.pop(0) if self.reasons else None

    def close(self):
        self.closed = True


def test_a_hang_is_logged_with_its_stacks_and_ends_the_process(caplog, capfd):
    codes = []
    watch = Watch(None, "it hangs")
    Watchdog(watch, codes.append).start()
    until(lambda: codes)

    assert codes == [HANG_EXIT_CODE]
    assert watch.closed
    assert "it hangs" in caplog.text
    assert "in until" in capfd.readouterr().err


def test_a_process_whose_log_is_blocked_ends_nevertheless(monkeypatch):
    unblocked = threading.Event()
    monkeypatch.setattr(watchdog_module, "_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(watchdog_module, "_report", lambda reason: unblocked.wait(GIVE_UP))
    codes = []
    Watchdog(Watch("it hangs"), codes.append).start()
    until(lambda: codes)
    unblocked.set()


def test_a_process_that_gets_no_thread_for_its_report_ends_nevertheless(monkeypatch):
    start = threading.Thread.start
    codes, watch = [], Watch("it hangs")

    def refuse(thread):
        if thread.name != "watchdog":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    Watchdog(watch, codes.append).start()

    until(lambda: codes)
    assert codes == [HANG_EXIT_CODE]


def test_a_watchdog_that_is_stopped_checks_no_more():
    watch = Watch(*[None] * 10_000)
    watchdog = Watchdog(watch, pytest.fail)
    watchdog.start()
    watchdog.stop()
    left = len(watch.reasons)
    time.sleep(0.02)

    assert watch.closed
    assert len(watch.reasons) == left
    Watchdog(watch).stop()  # was never started


def test_only_a_loop_that_handles_no_callbacks_is_stuck():
    async def scenario():
        watch = LoopWatch(asyncio.get_running_loop(), 0.4)
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert watch.check() is None
        silences = []
        for _ in range(6):
            time.sleep(0.09)  # noqa: ASYNC251 - blocks the event loop on purpose
            silences.append(watch.check())
        assert silences[0] is None
        assert "stuck for" in silences[-1]

        await asyncio.sleep(0.1)
        assert watch.check() is None

    asyncio.run(scenario())


SCRIPT = """
import asyncio, time
from server.engine.link.engine_process.watchdog import LoopWatch, Watchdog
async def main():
    Watchdog(LoopWatch(asyncio.get_running_loop(), 0.3)).start()
    await asyncio.sleep(0.2)
    time.sleep(60)
asyncio.run(main())
"""


def test_a_process_with_a_stuck_event_loop_ends_by_itself_and_says_where():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=GIVE_UP, check=False
    )

    assert done.returncode == HANG_EXIT_CODE
    assert "the event loop has been stuck for" in done.stderr
    assert 'File "<string>", line 7 in main' in done.stderr


def test_the_time_without_requests_does_not_count_for_the_next_activity(monkeypatch):
    class Begins(Progress):
        """Begins to handle messages at the moment at which it is looked at."""

        def allowed_seconds(self, hang_seconds):
            self.begin(Activity.MESSAGES)
            return super().allowed_seconds(hang_seconds)

    progress = Begins()
    progress.begin(Activity.IDLE)
    watch = EngineWatch(None, progress, hang_seconds=1.0)
    monkeypatch.setattr(watch, "_send", lambda message: None)
    watch._silence.seconds = 1e6
    watch._count = progress.count

    assert watch.check() is None
