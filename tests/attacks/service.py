"""Starts the service that is attacked."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from tests.attacks.record import Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

API_KEY = "key-of-the-attacked-service"
MAX_DESCRIPTORS = 1024
"""Limit of descriptors of each of its processes, which many systems have as their default."""
_START_SECONDS = 120.0
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@contextlib.contextmanager
def attacked_service(options: Sequence[str] = ()) -> Iterator[Target]:
    """Serve the bundled model on the CPU, with an API key and few descriptors, and stop the service at the end.

    Raises:
        RuntimeError: it did not start.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [
            "sh", "-c", f'ulimit -n {MAX_DESCRIPTORS} && exec "$@"', "sh",
            sys.executable, "-m", "server.cli.main", "serve", f"--port={port}", f"--api-key={API_KEY}", "--device=cpu",
            f"--chat-template={_TEMPLATE}", "--log-level=warning", *options,
        ],
    )  # fmt: skip
    target = Target(host="127.0.0.1", port=port, api_key=API_KEY, pid=process.pid)
    try:
        _wait_until_ready(process, target)
        yield target
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], target: Target) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{target.url}/health"):  # noqa: S310 - ours
            return
        time.sleep(0.05)
    raise RuntimeError("the service did not start")
