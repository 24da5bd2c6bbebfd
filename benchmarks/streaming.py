"""Measures the CPU time that the front end needs per streamed token.

The service is real except for its engine, a process without a model that sends every stream its next token at a given
rate (`benchmarks.paced_engine`). The client is `tessera bench serve`. At a low rate the front end keeps up and sends
each token separately; at a high rate it sends the tokens of several steps together. The result is the CPU time of the
front-end processes from the first request to the last, which other load on the machine affects less than wall time.

    python -m benchmarks.streaming [--streams 256] [--rates 60 160 400] [--tokens 1000] [--frontends 1]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import service
from server.cli.command_settings import read_settings
from server.cli.serve import serve

_PROMPT_TOKENS = 8
SERVE = "serve"
"""First argument with which this script runs as the service; the rate and options of `tessera serve` follow."""


def run_service(rate: str, options: list[str]) -> None:
    """Serve with a paced engine, in this process."""
    serve(read_settings(options), (sys.executable, "-m", "benchmarks.paced_engine", rate))


def metric(url: str, name: str) -> float:
    """Return the value of one metric of GET /metrics."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:  # noqa: S310
        lines = reply.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def measure(streams: int, rate: float, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Put load on a service and return a record with the CPU time of its front end per token."""
    settings = [f"--max-concurrent-requests={streams}", f"--max-num-seqs={streams}"]
    settings += [f"--frontends={options.frontends}"] if options.frontends > 1 else []
    program = ("benchmarks.streaming", SERVE, str(rate))
    with service(settings, program=program) as (url, _), tempfile.TemporaryDirectory() as folder:
        before = metric(url, "process_cpu_seconds_total")
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                sys.executable, "-m", "server.cli.main", "bench", "serve", f"--url={url}",
                f"--input-len={_PROMPT_TOKENS}", f"--output-len={tokens}", f"--concurrency={streams}",
                f"--prompts={streams}", f"--warm-up={streams}", f"--processes={options.processes}", f"--json={report}",
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        run = json.loads(report.read_text())["runs"][0]
        seconds = metric(url, "process_cpu_seconds_total") - before
    assert run["failed"] == 0, run
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
    libraries = ("uvicorn", "uvloop", "httptools", "starlette", "msgspec", "pyzmq")
    write_report("streaming", rows, libraries, folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()
