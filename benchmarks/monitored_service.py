"""Prometheus with the rules of `deploy/prometheus`, scraping one service under load.

Needs the program `prometheus` (a Debian package).
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.service import free_port, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

_RULES: Final = Path(__file__).parents[1] / "deploy/prometheus"
_TARGET: Final = '"tessera:8000"'
_PREFIX: Final = "def shared(items):\n    # The same beginning for all clients.\n" * 8


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _get(self, path: str, **arguments: str) -> dict[str, Any]:
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}") as reply:  # noqa: S310 - our own server
            found: dict[str, Any] = json.load(reply)["data"]
        return found

    def values(self, expression: str) -> list[float]:
        """Return the finite values that an expression has now, one for each series."""
        found = [float(it["value"][1]) for it in self._get("query", query=expression)["result"]]
        return [value for value in found if math.isfinite(value)]

    def series(
        self, expression: str, start: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        """Return the series of an expression, each a dict of `metric` and `values`.

        Args:
            expression: in PromQL.
            start: Unix time in seconds.
            end: likewise.
            step: seconds between two values.
        """
        limits = {"start": str(start), "end": str(end), "step": str(step)}
        found: list[dict[str, Any]] = self._get("query_range", query=expression, **limits)["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Return the state of all rules: `name`, `health`, of alerts `state`, and `lastError` if there is one."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]


@contextlib.contextmanager
def prometheus(url: str) -> Iterator[Prometheus]:
    """Scrape a service with the configuration of `deploy/prometheus`, in which only the target is changed.

    Args:
        url: of the service.

    Raises:
        SystemExit: the program `prometheus` is missing or did not start.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("prometheus is not installed (a Debian package of this name)")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "prometheus.yml")
        text = (_RULES / config.name).read_text()
        assert _TARGET in text
        config.write_text(text.replace(_TARGET, f'"{urllib.parse.urlsplit(url).netloc}"'))
        for rules in ("recording.yml", "alerts.yml"):
            shutil.copy(_RULES / rules, folder)
        command = [
            program, f"--config.file={config}", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        ]  # fmt: skip
        with serving(command, port, "/-/ready") as (address, _):
            yield Prometheus(address)


def load(url: str, rate: float, seconds: float) -> None:
    """Send streamed requests at random times, and once a second one whose beginning is always the same.

    Requests that fail or are refused are part of the load. `tessera bench serve` sends the streams.

    Args:
        url: of the service.
        rate: streams per second.
        seconds: duration of the arrivals; those in flight are awaited after that.
    """
    done = threading.Event()

    def repeat_prefix() -> None:
        body = {"inputs": _PREFIX, "parameters": {"max_new_tokens": 16}}
        request = urllib.request.Request(  # noqa: S310 - our own service
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        while not done.wait(1):
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(request) as reply,  # noqa: S310 - our own service
            ):
                reply.read()

    thread = threading.Thread(target=repeat_prefix)
    thread.start()
    try:
        subprocess.run(
            [
                sys.executable, "-m", "server.cli.main", "bench", "serve", f"--url={url}", "--warm-up=0",
                f"--rate={rate}", f"--prompts={round(rate * seconds)}", "--input-len=20-200",
                "--output-len=20-120", "--ignore-eos",
            ],
            stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    finally:
        done.set()
        thread.join()
