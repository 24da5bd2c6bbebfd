"""Two processes serve one model on a CPU; a rank that dies takes its engine along, and both are replaced."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import CLIENT, Service
from tests.waiting import is_running, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

BODY = {"inputs": "def add(a, b):", "parameters": {"max_new_tokens": 24}}


@pytest.fixture
def service():
    service = Service(["--device=cpu", "--tensor-parallel=2", "--dtype=float32"])
    service.wait_until_healthy()
    yield service
    service.stop()


def generate(service):
    return CLIENT.post(f"{service.url}/generate", json=BODY, timeout=180)


def children(pid):
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def alone():
    service = Service(["--device=cpu", "--dtype=float32", "--quantization=none"])
    try:
        service.wait_until_healthy()
        return generate(service).json()["generated_text"]
    finally:
        service.stop()


def test_a_killed_rank_is_replaced_and_the_replies_are_those_of_one_process(service):
    kill_a_rank(service, expected=alone())


def kill_a_rank(service, expected):
    """Kill the rank beside the engine; require that both are replaced, and that replies are as before."""
    assert generate(service).json()["generated_text"] == expected
    engine = service.engine_pid()
    (rank,) = children(engine)

    os.kill(rank, signal.SIGKILL)

    deadline = time.monotonic() + 60
    while (reply := generate(service)).status_code != 200:
        assert time.monotonic() < deadline, service.log()
        time.sleep(0.1)
    assert reply.json()["generated_text"] == expected
    assert service.engine_pid() != engine
    (replaced,) = children(service.engine_pid())
    assert service.metric("tessera_engine_restarts_total") == 1
    assert "rank 1 ended with status -9" in service.stop()
    assert not Path(f"/proc/{replaced}").exists()


def test_a_killed_engine_ends_its_ranks(service):
    engine = service.engine_pid()
    (rank,) = children(engine)

    os.kill(engine, signal.SIGKILL)

    until(lambda: not is_running(rank))


def test_a_stopped_rank_ends_its_engine_and_both_are_replaced(start_service):
    service = start_service(
        "--device=cpu", "--tensor-parallel=2", "--dtype=float32", "--engine-hang-seconds=5"
    )
    service.wait_until_healthy()
    # The first step of a size may take ten times as long.
    assert generate(service).status_code == 200
    (rank,) = children(service.engine_pid())
    os.kill(rank, signal.SIGSTOP)

    deadline = time.monotonic() + 200
    while generate(service).status_code != 200:
        assert time.monotonic() < deadline, service.log()

    assert service.metric("tessera_engine_restarts_total") >= 1
    assert not is_running(rank)


def test_a_killed_engine_ends_ranks_that_are_stopped(service):
    engine = service.engine_pid()
    (rank,) = children(engine)
    os.kill(rank, signal.SIGSTOP)

    os.kill(engine, signal.SIGKILL)

    until(lambda: not is_running(rank))
