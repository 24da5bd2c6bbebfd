"""Runs `tessera serve` for the duration of a measurement."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SERVE = ("server.cli.main", "serve")


@contextlib.contextmanager
def service(
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = _SERVE,
) -> Iterator[tuple[str, float]]:
    """Serve on a free port, without a prefix cache.

    Args:
        options: options of `tessera serve`.
        environment: variables to add to this process's environment.
        program: a module and its first arguments; it must accept the options of `tessera serve`.

    Yields:
        The URL, and the seconds from starting the command to the first 200 of /health.

    Raises:
        SystemExit: the service exited before it was ready.
    """
    port = free_port()
    changed = ["env", *(f"{name}={value}" for name, value in (environment or {}).items())]
    command = [*changed, sys.executable, "-m", *program, f"--port={port}"]
    quiet = ["--log-level=warning", "--enable-prefix-caching=false"]
    with serving([*command, *quiet, *options], port) as started:
        yield started


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[tuple[str, float]]:
    """Run a server.

    Args:
        command: starts a server with a GET /health.
        port: on which it listens.

    Yields:
        The URL, and the seconds from starting the command to the first 200 of /health.

    Raises:
        SystemExit: the server exited before it was ready.
    """
    start = time.perf_counter()
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as reply:  # noqa: S310
                if reply.status == 200:
                    break
            if process.poll() is not None:
                raise SystemExit("the service did not start")
            time.sleep(0.01)
        yield url, time.perf_counter() - start
    finally:
        process.terminate()
        process.wait()
