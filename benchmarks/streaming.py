"""What does one streamed token cost the front end, in processor time?

The service is real but for its engine, which is a process that computes nothing and hands every stream its next token
at a given pace (`benchmarks.paced_engine`); the client is `tessera bench serve`. So many steps a second that the front
end keeps up show what a lone token costs, more show what it costs when several steps wait. Counted is the processor
time of the front-end processes, from the first request to the last, which a busy machine disturbs less than the wall
clock.

    python -m benchmarks.streaming [--streams 256] [--rates 60 160 400] [--tokens 1000] [--frontends 1]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.report import add_bookkeeping, write_report
from server.cli.serve import serve
from server.cli.settings import Settings

_PROMPT_TOKENS = 8


def run_service(settings: dict[str, Any], rate: float) -> None:
    """Serve with a paced engine, in this process."""
    command = (sys.executable, "-m", "benchmarks.paced_engine", str(rate))
    serve(Settings(_cli_parse_args=[], **settings), command)


def metric(port: int, name: str) -> float:
    """One number of GET /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def wait_until_ready(port: int) -> None:
    """Return once the service takes requests."""
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
        else:
            return


def measure(streams: int, rate: float, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Load a service and return what its front end needed for each token."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    settings: dict[str, Any] = {"port": port, "log_level": "warning"}
    settings |= {"max_concurrent_requests": streams, "max_num_seqs": streams}
    if options.frontends > 1:
        settings["frontends"] = options.frontends
    service = multiprocessing.get_context("spawn").Process(
        target=run_service, args=(settings, rate)
    )
    service.start()
    wait_until_ready(port)
    before = metric(port, "process_cpu_seconds_total")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                sys.executable, "-m", "server.cli.main", "bench", "serve", f"--url=http://127.0.0.1:{port}",
                f"--input-len={_PROMPT_TOKENS}", f"--output-len={tokens}", f"--concurrency={streams}",
                f"--prompts={streams}", f"--warm-up={streams}", f"--processes={options.processes}", f"--json={report}",
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        run = json.loads(report.read_text())["runs"][0]
    seconds = metric(port, "process_cpu_seconds_total") - before
    assert service.pid is not None
    os.kill(service.pid, signal.SIGTERM)
    service.join()
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rates", type=float, nargs="+", default=[60, 160, 400])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="the best one counts")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="of the client")
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
