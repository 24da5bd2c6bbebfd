"""Measures the CPU time that the front end needs per streamed token.

The service is real except for its engine, a process without a model that sends every stream its next token at a given
rate (`benchmarks.paced_engine`). The client is `tessera bench serve`. At a low rate the front end keeps up and sends
each token separately; at a high rate it sends the tokens of several steps together. The result is the CPU time of the
front-end processes from the first request to the last, which other load on the machine affects less than wall time.

    python -m benchmarks.streaming [--streams 256] [--rates 60 160 400] [--tokens 1000] [--frontends 1]
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.request
from typing import Any

from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import load, service
from server.cli.command_settings import read_settings
from server.cli.serve import serve
from tests.reliability.managed_service import read_metrics

_PROMPT_TOKENS = 8
SERVE = "serve"
"""First argument with which this script runs as the service; the rate and options of `tessera serve` follow."""


def run_service(rate: str, options: list[str]) -> None:
    """Serve with a paced engine, in this process."""
    serve(read_settings(options), (sys.executable, "-m", "benchmarks.paced_engine", rate))


def cpu_seconds(url: str) -> float:
    """Return the processor time of the front ends so far."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:  # noqa: S310 - the own service
        metrics = read_metrics(reply.read().decode())
    return float(metrics["process_cpu_seconds_total"])


def measure(streams: int, rate: float, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Put load on a service and return a record with the CPU time of its front end per token."""
    settings = [f"--max-concurrent-requests={streams}", f"--max-num-seqs={streams}"]
    settings += [f"--frontends={options.frontends}"] if options.frontends > 1 else []
    program = ("benchmarks.streaming", SERVE, str(rate))
    clients = [f"--warm-up={streams}", f"--processes={options.processes}"]
    with service(settings, program=program) as (url, _):
        before = cpu_seconds(url)
        run = load(url, _PROMPT_TOKENS, tokens, streams, *clients)
        seconds = cpu_seconds(url) - before
    return {
        "frontends": options.frontends,
        "streams": streams,
        "steps_per_second": rate,
        "tokens_each": tokens,
        "cpu_us_per_token": round(1e6 * seconds / (2 * streams * tokens), 2),
        "tokens_per_second": round(run["output_tokens_per_second"]),
        "itl_p99_ms": round(run["itl_ms"]["percentiles"]["99"], 2),
        "client_busy": max(run["client_busy"]),
        "machine_load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure and write the report."""
    if sys.argv[1:2] == [SERVE]:
        run_service(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rates", type=float, nargs="+", default=[60, 160, 400])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds per rate; the fastest is reported"
    )
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="processes of the client")
    add_bookkeeping(parser)
    options = parser.parse_args()
    rows = []
    for rate in options.rates:
        rounds = [
            measure(options.streams, rate, options.tokens, options) for _ in range(options.rounds)
        ]
        rows.append(min(rounds, key=lambda row: row["cpu_us_per_token"]))
    libraries = ("uvicorn", "uvloop", "httptools", "starlette", "msgspec")
    write_report("streaming", rows, libraries, folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()
