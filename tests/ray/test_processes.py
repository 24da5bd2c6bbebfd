"""A command in a child process, of which nothing is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import is_running, until

ROOT = Path(__file__).parents[2]
PROGRAM = f"""
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from server.ray import processes
processes.START_SECONDS = processes._LEFT_SECONDS = 0.5

def stubborn():
    # A daemon that left its parent and its session, and ignores SIGTERM.
    subprocess.run(["sh", "-c", "trap '' TERM; setsid sleep 600 & echo $!"])

def command(started):
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl and /proc")


def start(body):
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"{PROGRAM}{lines}\nsys.exit(processes.run(command))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("return 0", 0), ("return 3", 3), ("sys.exit(4)", 4), ("sys.exit('why')", 1), ("sys.exit()", 0),
        ("raise OSError", 1), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9),
    ],
)  # fmt: skip
def test_the_status_is_that_of_the_command(body, status):
    with start(body) as process:
        assert process.wait(60) == status


def test_what_the_command_leaves_is_ended():
    with start("stubborn()\nreturn 5") as process:
        daemon = int(process.stdout.readline())
        assert process.wait(60) == 5
    assert not is_running(daemon)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_before_the_command_has_started_ends_it_and_all_that_it_started(number):
    body = "signal.signal(signal.SIGTERM, lambda *_: None)\nstubborn()\nwhile True: time.sleep(1)"
    with start(body) as process:
        daemon = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == 0
    assert not is_running(daemon)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_afterwards_is_passed_on_as_often_as_it_comes(number):
    body = (
        "got = []\ndef handle(*_):\n    got.append(1)\n"
        "    os.write(1, b'%d\\n' % len(got))\n"  # `print` may be interrupted within the other one
        "signal.signal(signal.SIGTERM, handle)\n"
        "started()\nprint('started', flush=True)\n"
        "while len(got) < 2: time.sleep(0.01)\nreturn 7"
    )
    with start(body) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.stdout.readline() == "1\n"
        process.send_signal(number)
        assert process.wait(60) == 7


def test_a_signal_that_is_ignored_as_by_nohup_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start("print('started', flush=True)\ntime.sleep(1)\nreturn 9")
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 9


def test_the_command_ends_with_its_parent():
    body = "print(os.getpid(), flush=True)\nstarted()\nwhile True: time.sleep(0.1)"
    with start(body) as process:
        child = int(process.stdout.readline())
        assert os.getpgid(child) == child  # so that Ctrl-C goes to the parent alone
        process.kill()
        until(lambda: not is_running(child))
