"""`tessera complete` against a real service."""

import signal
import subprocess
import sys
import time

import pytest

from tests.waiting import GIVE_UP

pytestmark = pytest.mark.e2e


def command(*arguments):
    return [sys.executable, "-m", "server.cli.main", "complete", *arguments]


def test_a_prompt_on_standard_input_is_continued_as_generate_does(bundled_service):
    from tests.e2e.conftest import CLIENT

    prompt = "def fibonacci(n):\n"
    done = subprocess.run(
        command(bundled_service.url, "--max-tokens=16", "--temperature=0"),
        input=prompt, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip

    body = {"inputs": prompt, "parameters": {"max_new_tokens": 16}}
    reply = CLIENT.post(f"{bundled_service.url}/generate", json=body).json()
    assert done.stdout == reply["generated_text"]


def test_an_interrupt_aborts_the_request(bundled_service):
    arguments = command(bundled_service.url, "--max-tokens=2000", "import ")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        assert process.wait(GIVE_UP) == 130

    deadline = time.monotonic() + 10
    while bundled_service.metric("tessera_requests_running") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert bundled_service.metric("tessera_requests_running") == 0
