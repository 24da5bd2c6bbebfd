"""Runs `tessera serve` and `tessera bench` for a measurement."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def bench(
    kind: str, options: Sequence[str], *, quiet: bool = True, seconds: float | None = None
) -> dict[str, Any]:
    """Run `tessera bench` in a process of its own and return its result.

    Args:
        kind: "engine" or "serve".
        options: of that command.
        quiet: whether its output is dropped.
        seconds: after which it is ended.

    Raises:
        subprocess.SubprocessError: it failed or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "server.cli.main", "bench", kind, *options]
        # The commit is that of the benchmark's own result.
        command += [f"--json={file}", "--commit=unknown"]
        output = subprocess.DEVNULL if quiet else None
        done = subprocess.run(command, check=False, stdout=output, timeout=seconds)
        done.check_returncode()
        result: dict[str, Any] = json.loads(file.read_text())
    return result


def load(
    url: str, prompt_tokens: int, output_tokens: int, streams: int, *options: str
) -> dict[str, Any]:
    """Return the run of `tessera bench serve` in which each of `streams` clients sends one request.

    Args:
        url: of the service.
        prompt_tokens: of each request.
        output_tokens: of each request.
        streams: number of clients.
        options: further options.
    """
    lengths = [f"--input-len={prompt_tokens}", f"--output-len={output_tokens}"]
    clients = [f"--concurrency={streams}", f"--prompts={streams}"]
    run: dict[str, Any] = bench("serve", [f"--url={url}", *lengths, *clients, *options])["runs"][0]
    assert run["failed"] == 0, run
    return run


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
