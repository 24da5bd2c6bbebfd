"""The end of a process in bounded time."""

import subprocess
import sys
import threading
import time

import pytest

from server.cli.exit_deadline import ExitDeadline

SCRIPT = """
import signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from server.cli.exit_deadline import exit_bounded, exit_within
with exit_bounded():
    child = subprocess.Popen(["sleep", "300"])
    child.send_signal(signal.SIGSTOP)
    print(child.pid, flush=True)
"""


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        ("ThreadPoolExecutor(1).submit(threading.Event().wait)", 0),
        ("threading.Thread(target=threading.Event().wait).start()", 0),
        ("ThreadPoolExecutor(1).submit(time.sleep, 300); sys.exit(3)", 3),
        ("ThreadPoolExecutor(1).submit(time.sleep, 300); 1 / 0", 1),
        ("exit_within(0.2); threading.Event().wait()", 0),
        ("exit_within(0.2); exit_within(300); time.sleep(300)", 0),
    ],
)
def test_a_process_ends_with_its_children_whatever_its_threads_wait_for(rest, status):
    command = [sys.executable, "-c", f"{SCRIPT}    {rest}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        # The child has the same standard output: its end says that the child has ended too.
        _, errors = process.communicate(timeout=60)

    assert process.returncode == status, errors


def test_a_process_whose_global_lock_is_held_ends_with_its_stacks_in_the_log():
    # A function of the C library, called with the lock.
    script = (
        "import ctypes; from server.cli.exit_deadline import exit_within; exit_within(0.1); "
        "ctypes.PyDLL(None).sleep(300)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )

    assert process.returncode == 1
    assert "exit_deadline" in process.stderr or "<string>" in process.stderr


def test_an_earlier_deadline_stays():
    ended, statuses, backstops = threading.Event(), [], []

    def end(status):
        statuses.append(status)
        ended.set()

    deadline = ExitDeadline(end, backstops.append)
    began = time.monotonic()
    deadline.set(30)
    deadline.set(0.05)
    deadline.set(60, status=4)

    assert ended.wait(60)
    assert time.monotonic() - began >= 0.05
    assert backstops == [31, 1.05]
    assert statuses == [4]
