"""Starts `tessera serve` as a subprocess and finds its engine process."""

import contextlib
import os
import signal
import socket
import sys
import time
import weakref

import httpx
import pytest

from tests.e2e.logged_process import start_logged
from tests.reliability.processes import Role, process_tree
from tests.waiting import GIVE_UP

# Shared because creating a client takes longer than a request. It keeps no connections: a kept connection would always
# reach the same front end.
CLIENT = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))


class Service:
    """One running `tessera serve`."""

    def __init__(self, arguments, environment=(), program=("-m", "server.cli.main"), folder=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, *program, "serve", f"--port={self.port}"]
        self.process, self._log = start_logged(
            [*command, *arguments], env=os.environ | dict(environment), cwd=folder
        )
        weakref.finalize(self, self._log.unlink)
        self.started = time.monotonic()

    def wait_until_healthy(self, seconds=60.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if CLIENT.get(f"{self.url}/health").status_code == 200:
                    return
            assert self.process.poll() is None, self.log()
            time.sleep(0.02)
        raise AssertionError(f"not healthy within {seconds} s")

    def engine_pid(self):
        (engine,) = (it.pid for it in process_tree(self.process.pid) if it.role is Role.ENGINE)
        return engine

    def metric(self, name):
        for line in CLIENT.get(f"{self.url}/metrics").text.splitlines():
            if line.split("{")[0].split(" ")[0] == name:
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=GIVE_UP)
            return self.log()
        finally:
            self.process.kill()

    def log(self):
        """Return what the service has written to standard error so far."""
        return self._log.read_text()


@pytest.fixture(scope="session")
def bundled_service():
    """The bundled model on the CPU, shared by all tests. A test must not change its state."""
    service = Service(["--device=cpu"])
    service.wait_until_healthy()
    yield service
    service.stop()


@pytest.fixture
def start_service():
    """Starts services that are stopped at the end of the test."""
    services = []

    def start(*arguments, environment=()):
        services.append(Service(list(arguments), environment))
        return services[-1]

    yield start
    for service in services:
        service.stop()
