"""Measures what frequent scrapes of /metrics cost the streams: an endpoint picker reads it 20 times a second.

The service has a paced engine, so that the front end alone determines the latency. Rounds alternate between scrapes of
the service and three controls: no scrapes, scrapes of `/health`, which take the event loop as much but for the metrics
themselves, and scrapes of another service that is idle, which take the machine as much but not this event loop. On a
machine with few cores the last of them is what the scraping program costs by its own use of a core. The result is the
median of the rounds. Each scrape opens a connection, which clients that keep theirs do not.

    python -m benchmarks.scrapes [--rate 60] [--streams 64] [--tokens 600] [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import load, service
from benchmarks.streaming import SERVE

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRAPES_PER_SECOND: Final = 20


@contextlib.contextmanager
def scraping(url: str) -> Iterator[list[float]]:
    """Read a URL at a constant rate, or nothing if it is empty; the value is a list of the seconds that each took."""
    seconds: list[float] = []
    done = threading.Event()

    def scrape() -> None:
        while not done.wait(1 / SCRAPES_PER_SECOND):
            start = time.perf_counter()
            with urllib.request.urlopen(url) as reply:  # noqa: S310 - the own service
                reply.read()
            seconds.append(time.perf_counter() - start)

    thread = threading.Thread(target=scrape)
    if url:
        thread.start()
    try:
        yield seconds
    finally:
        done.set()
        if url:
            thread.join()


def measure(url: str, scraped: str, streams: int, tokens: int) -> dict[str, float]:
    """Load the service at `url` while `scraped` is read.

    Returns:
        Percentiles of the latency between tokens and the median time of a scrape, in milliseconds.
    """
    with scraping(scraped) as seconds:
        run = load(url, 16, tokens, streams, "--warm-up=0")
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
    settings = [f"--max-num-seqs={options.streams}", f"--max-concurrent-requests={options.streams}"]
    program = ("benchmarks.streaming", SERVE, str(options.rate))
    with (
        service(settings, program=program) as (url, _),
        service(settings, program=program) as (idle, _),
    ):
        scraped = {
            "nothing": "",
            "/metrics of an idle service": f"{idle}/metrics",
            "/health": f"{url}/health",
            "/metrics": f"{url}/metrics",
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in scraped}
        measure(url, "", options.streams, 50)
        for _ in range(options.rounds):
            for name, rounds in found.items():
                rounds.append(measure(url, scraped[name], options.streams, options.tokens))
    rows: list[dict[str, Any]] = []
    for name, rounds in found.items():
        median = {key: statistics.median(it[key] for it in rounds) for key in rounds[0]}
        row = {
            "scraped": name,
            "scrapes_per_second": SCRAPES_PER_SECOND if scraped[name] else 0,
            "streams": options.streams,
            "steps_per_second": options.rate,
            **{key: round(value, 3) for key, value in median.items()},
            "itl_p99_ms_of_rounds": [round(it["itl_p99_ms"], 3) for it in rounds],
        }
        if rows:
            row["itl_p99_change"] = round(row["itl_p99_ms"] / rows[0]["itl_p99_ms"] - 1, 4)
        rows.append(row)
    libraries = ("uvicorn", "uvloop", "httptools", "starlette", "prometheus-client")
    write_report("scrapes", rows, libraries, folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()
