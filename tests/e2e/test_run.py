"""`tessera run` with a real service."""

import signal
import subprocess
import sys

import pytest

from tests.reliability.processes import process_tree
from tests.waiting import GIVE_UP, is_running, until

pytestmark = pytest.mark.e2e
RUN = [sys.executable, "-m", "server.cli.main", "run"]


@pytest.mark.slow
def test_a_service_of_its_own_answers_and_ends_with_the_command():
    done = subprocess.run(
        [*RUN, "bundled", "def add(a, b):", "--port=0", "--max-tokens=8", "--temperature=0"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip

    assert done.stdout.strip()
    assert "Traceback" not in done.stderr


def test_a_running_service_gives_the_same_answer(bundled_service):
    message, flags = "def add(a, b):", ["--max-tokens=8", "--temperature=0"]
    done = subprocess.run(
        [*RUN, "bundled", message, *flags, f"--port={bundled_service.port}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    assert "[using the service at" in done.stderr
    other = subprocess.run(
        [sys.executable, "-m", "server.cli.main", "complete", bundled_service.url, message, *flags],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == other.stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_service_ends_however_the_command_ends(number):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [*RUN, "bundled", "--port=0"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        signal.signal(signal.SIGINT, before)
        for line in process.stderr:
            if "loading" in line:
                break
        others = [it.pid for it in process_tree(process.pid) if it.pid != process.pid]
        assert len(others) >= 2
        process.send_signal(number)
        process.wait(GIVE_UP)
        process.stdin.close()

    until(lambda: not any(map(is_running, others)))
