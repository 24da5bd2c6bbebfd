"""Processes of a running service are stopped, and the service recovers or ends; pauses of all of it do no harm."""

import concurrent.futures
import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.control import Control
from tests.e2e.test_frontends import FrontEndService, body, events
from tests.waiting import GIVE_UP, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HANG_SECONDS = 3


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def start(*arguments, behaviour="slow"):
            service = FrontEndService(
                behaviour, f"--engine-hang-seconds={HANG_SECONDS}", *arguments
            )
            stack.callback(service.stop)
            service.wait_until_healthy()
            time.sleep(0.5)  # heartbeats
            return service

        yield start


def processes(service):
    return [
        service.process.pid,
        *service.children("server.cli.front_end.process"),
        *service.children("fake_engine"),
    ]


def are_gone(pids):
    return not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_stopped_engine_makes_health_fail_until_another_one_is_ready(start):
    service = start("--frontends=1")
    (engine,) = service.children("fake_engine")
    with Control() as control:
        os.kill(engine, signal.SIGSTOP)
        stopped = time.monotonic()
        until(lambda: service.health() == 503)
        seconds = time.monotonic() - stopped
    assert seconds < control.allowed(HANG_SECONDS + 2)
    until(lambda: service.health() == 200)

    assert service.metric("tessera_engine_restarts_total") == 1
    assert service.children("fake_engine") != [engine]


def test_a_killed_engine_makes_health_fail_within_a_second(start):
    service = start("--frontends=1")
    with Control() as control:
        os.kill(service.children("fake_engine")[0], signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: service.health() == 503)
        seconds = time.monotonic() - killed

    assert seconds < control.allowed(1.0)


def test_a_stopped_front_end_is_replaced_and_its_requests_are_aborted(start):
    service = start()
    (victim, doomed), (_, other) = service.one_client_each().items()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        lost = pool.submit(events, doomed, 400)
        kept = pool.submit(events, other, 100)
        until(lambda: service.metric("tessera_requests_running") == 2)
        os.kill(victim, signal.SIGSTOP)
        with pytest.raises(httpx.TransportError):
            lost.result(timeout=HANG_SECONDS + 10)
        assert len(kept.result()) == 100
    until(lambda: victim not in service.children("server.cli.front_end.process"))
    until(lambda: len(service.children("server.cli.front_end.process")) == 2)
    assert "a front end has been silent for" in service.log()


def test_a_stopped_main_process_ends_the_service(start):
    service = start()
    pids = processes(service)
    os.kill(service.process.pid, signal.SIGSTOP)

    until(lambda: service.process.poll() is not None)
    until(lambda: are_gone(pids[1:]))
    assert service.process.returncode == -signal.SIGKILL
    assert "the main process of the service fails" in service.log()


@pytest.mark.parametrize("front_ends", [1, 2])
@pytest.mark.parametrize("paused", ["all", "all but the engine"])
def test_a_pause_longer_than_the_limit_ends_nothing(start, front_ends, paused):
    service = start(f"--frontends={front_ends}")
    pids = processes(service)
    targets = pids if paused == "all" else pids[:-1]
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(1) as pool:
        client = stack.enter_context(httpx.Client(base_url=service.url, timeout=60))
        stream = pool.submit(events, client, 60)
        until(lambda: service.metric("tessera_requests_running") == 1)
        for pid in targets:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.5 * HANG_SECONDS)
        for pid in targets:
            os.kill(pid, signal.SIGCONT)

        assert len(stream.result()) == 60
    time.sleep(1.5 * HANG_SECONDS)  # whoever would be killed now is killed by then
    assert processes(service) == pids
    assert service.metric("tessera_engine_restarts_total") == 0
    assert httpx.post(f"{service.url}/generate", json=body(3), timeout=GIVE_UP).status_code == 200
