"""Measures what frequent scrapes of /metrics cost the streams: an endpoint picker reads it 20 times a second.

The service has a paced engine, so that the front end alone determines the latency. Runs with and without scrapes
alternate; the result is the median of the rounds.

    python -m benchmarks.scrapes [--rate 60] [--streams 64] [--tokens 600] [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import service
from benchmarks.streaming import SERVE

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRAPES_PER_SECOND: Final = 20


@contextlib.contextmanager
def scraping(url: str, rate: float) -> Iterator[list[float]]:
    """Read the metrics at a rate, 0 for never; the value is a list of the seconds that each took."""
    seconds: list[float] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.wait(1 / rate):
            start = time.perf_counter()
            with urllib.request.urlopen(f"{url}/metrics") as reply:  # noqa: S310 - the own service
                reply.read()
            seconds.append(time.perf_counter() - start)

    thread = threading.Thread(target=scrape)
    if rate:
        thread.start()
    try:
        yield seconds
    finally:
        done.set()
        if rate:
            thread.join()


def measure(url: str, scrapes: float, streams: int, tokens: int) -> dict[str, float]:
    """Load the service; returns percentiles of the latency between tokens and of a scrape, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder, scraping(url, scrapes) as seconds:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                sys.executable, "-m", "server.cli.main", "bench", "serve", f"--url={url}", "--input-len=16",
                f"--output-len={tokens}", f"--concurrency={streams}", f"--prompts={streams}", "--warm-up=0",
                f"--json={report}",
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        run = json.loads(report.read_text())["runs"][0]
    assert run["failed"] == 0, run
    percentiles = run["itl_ms"]["percentiles"]
    return {
        "itl_p50_ms": percentiles["50"],
        "itl_p99_ms": percentiles["99"],
        "scrape_ms": 1000 * statistics.median(seconds) if seconds else 0.0,
    }


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=60, help="steps of the engine per second")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    add_bookkeeping(parser)
    options = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {0: [], SCRAPES_PER_SECOND: []}
    settings = [f"--max-num-seqs={options.streams}", f"--max-concurrent-requests={options.streams}"]
    program = ("benchmarks.streaming", SERVE, str(options.rate))
    with service(settings, program=program) as (url, _):
        measure(url, 0, options.streams, 50)
        for _ in range(options.rounds):
            for scrapes, rounds in found.items():
                rounds.append(measure(url, scrapes, options.streams, options.tokens))
    rows: list[dict[str, Any]] = [
        {
            "scrapes_per_second": scrapes,
            "streams": options.streams,
            "steps_per_second": options.rate,
        }
        | {name: round(statistics.median(it[name] for it in rounds), 3) for name in rounds[0]}
        | {"itl_p99_ms_of_rounds": [round(it["itl_p99_ms"], 3) for it in rounds]}
        for scrapes, rounds in found.items()
    ]
    rows[1]["itl_p99_change"] = round(rows[1]["itl_p99_ms"] / rows[0]["itl_p99_ms"] - 1, 4)
    libraries = ("uvicorn", "uvloop", "httptools", "starlette", "prometheus-client")
    write_report("scrapes", rows, libraries, folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()
