"""Sends very many requests and fits a line to the service's memory, descriptors and tasks, whose slope must be 0.

    python -m tests.reliability.soak --engine fake --requests 1000000         # HTTP, processes, scheduler; no model
    python -m tests.reliability.soak --requests 20000                         # the bundled model on the CPU
    python -m tests.reliability.soak --device cuda --streams 256 --minutes 10 --disconnects

Memory is the anonymous memory of all processes, in RAM and swapped out. A thread that the program adds to the service
counts tasks, if there is one front end. On a GPU the memory in use on the whole device is sampled, so nothing else may
use it. The first fifth of the samples is warm-up. A quantity is flat if its slope does not exceed 0 by more than its
error with 95 % confidence, or if it grows by less than the resolution over the whole run: 4 MiB (a heap's arena is 1
MiB), 4 descriptors, 4 tasks, 0.1 % of the objects, 2 MiB on a GPU.

Exits with status 1 if a quantity grows, if requests fail, or if the service is not idle at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
from typing import Any, NamedTuple

import uvloop

from benchmarks.report import add_bookkeeping, write_report
from tests.reliability.chaos import is_idle
from tests.reliability.counted_service import ask
from tests.reliability.exchange import encode_post
from tests.reliability.fast_client import ClientRun
from tests.reliability.load import wait_until
from tests.reliability.managed_service import ManagedService
from tests.reliability.processes import anonymous_bytes, open_descriptors
from tests.reliability.trend import fit

_MIB = 1 << 20
_SAMPLES = 200
_WARM_UP = 0.2
_IDLE_SECONDS = 60.0
_CACHE_TOKENS = 8192
_WORDS = "def read(path, mode):\n    with open(path) as file:\n        return file.read()\n"


_FAKE_WORDS = "x = 1\n"  # tokens in the fake engine's small vocabulary


class Quantity(NamedTuple):
    """What is sampled.

    Attributes:
        unit: of the samples.
        resolution: growth over the whole run that the measurement cannot tell from none, as a number of units, or as a
            share of the first samples if it is below 1.
    """

    unit: str
    resolution: float


QUANTITIES = {
    "memory": Quantity("MiB", 4.0),
    "descriptors": Quantity("", 4.0),
    "tasks": Quantity("", 4.0),
    "objects": Quantity("", 0.001),
    "gpu_memory": Quantity("MiB", 2.0),
}


def soak_requests(
    tokens: list[int], prompt_characters: list[int], *, small_vocabulary: bool = False
) -> list[bytes]:
    """Make requests of all dialects, plain and streaming, with different lengths.

    Args:
        tokens: lengths of the outputs.
        prompt_characters: lengths of the prompts.
        small_vocabulary: whether the prompts have only tokens that the fake engine knows. Chat templates have others.
    """
    seed_text = _FAKE_WORDS if small_vocabulary else _WORDS
    requests = []
    for i, count in enumerate(tokens):
        length = prompt_characters[i % len(prompt_characters)]
        text = f"# {i}\n" + (seed_text * (1 + length // len(seed_text)))[:length]
        parameters = {"max_new_tokens": count, "ignore_eos": True, "details": i % 2 == 0}
        sampled = {"max_tokens": count, "ignore_eos": True, "temperature": 0.7, "seed": i}
        messages = [{"role": "user", "content": text}]
        requests += [
            encode_post("/generate", {"inputs": text, "parameters": parameters}),
            encode_post("/generate_stream", {"inputs": text, "parameters": parameters}),
            encode_post("/v1/completions", {"prompt": text, **sampled}),
            encode_post("/v1/completions", {"prompt": text, "stream": True, **sampled}),
        ]
        if not small_vocabulary:
            chat = {"messages": messages, "stream": True, **sampled}
            requests.append(encode_post("/v1/chat/completions", chat))
    return requests


def streaming_only(requests: list[bytes]) -> list[bytes]:
    """Return the requests whose replies are streams."""
    return [r for r in requests if r.startswith(b"POST /generate_stream") or b'"stream": true' in r]


def gpu_memory_mib() -> float:
    """Return the memory in use on the first GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(command, check=True, capture_output=True).stdout.split()[0])


class Soak:
    """One run.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._on_gpu = options.device == "cuda"
        self._samples: dict[str, list[float]] = {}
        arguments = [f"--device={options.device}", f"--frontends={options.front_ends}"]
        arguments += ["--access-log=false", f"--max-num-seqs={options.streams}"]
        if options.device == "cpu":
            # The cache's memory counts once it is written: a small one has been filled when the warm-up ends.
            arguments.append(f"--kv-cache-tokens={_CACHE_TOKENS}")
        arguments += options.serve.split() if options.serve else []
        if options.model:
            arguments.append(f"--model={options.model}")
        if options.load_format:
            arguments.append(f"--load-format={options.load_format}")
        program = (
            "-m",
            "tests.reliability.counted_service",
            "{folder}/counts",
            options.engine,
        )
        self._service = ManagedService(arguments, program=program)
        self._counts = str(self._service.folder / "counts")

    async def run(self) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
        """Run all of it; return a row for each quantity, a summary and the failures."""
        options = self._options
        try:
            self._service.start()
            await asyncio.to_thread(self._service.wait_until_ready)
            load = self._make_load()
            began = time.monotonic()
            running = asyncio.ensure_future(load.run())
            await self._sample_until_done(load, running, began)
            await running
            seconds = time.monotonic() - began
            idle = await wait_until(lambda: is_idle(self._service.metrics()), _IDLE_SECONDS)
            metrics = await asyncio.to_thread(self._service.metrics)
            code = await asyncio.to_thread(self._service.stop)
            failures = ["the service is not idle at the end"] if idle is None else []
            failures += [f"the service ended with status {code}"] if code else []
            if self._service.leftover_files():
                failures.append("files are left in the temporary folder")
        finally:
            self._service.close()
        bad = {str(s): n for s, n in load.statuses.items() if s not in (200, -1)}
        failures += [f"replies other than 200: {bad}, such as {load.samples}"] if bad else []
        if metrics["tessera_engine_restarts_total"]:
            failures.append("the engine was restarted")
        rows = self._fit()
        failures += [f"{row['quantity']} grows" for row in rows if not row["flat"]]
        summary = {
            "engine": options.engine if not options.model else options.model,
            "requests": load.done,
            "clients_left": load.statuses.get(-1, 0),
            "seconds": round(seconds),
            "requests_per_second": round(load.done / seconds, 1),
            "generated_tokens": int(metrics["tessera_generation_tokens_total"]),
            "preemptions": int(metrics["tessera_preemptions_total"]),
            "kv_blocks_free": int(metrics["tessera_kv_blocks_free"]),
            "kv_blocks": int(metrics["tessera_kv_blocks"]),
        }
        return rows, summary, failures

    def _make_load(self) -> ClientRun:
        options = self._options
        if options.engine == "fake":
            requests = soak_requests([1, 1, 2, 4], [10, 60], small_vocabulary=True)
        elif self._on_gpu:
            limit = int(json.loads(self._service.get("/info"))["max_total_tokens"])
            tokens = [min(n, limit // 2) for n in (16, 64, 128, 256, 512)]
            requests = streaming_only(soak_requests(tokens, [20, 200, min(2000, limit)]))
        else:
            requests = soak_requests([1, 2, 4, 8], [10, 100, 400])
        return ClientRun(
            self._service.port,
            requests,
            options.streams,
            None if options.minutes else options.requests,
            0.3 if options.disconnects else 0.02,
            3.0 if self._on_gpu else 0.05,
        )

    async def _sample_until_done(
        self, load: ClientRun, running: asyncio.Future[None], began: float
    ) -> None:
        interval = 0.2
        while not running.done():
            await asyncio.sleep(interval)
            now = time.monotonic() - began
            if self._options.minutes and now > 60 * self._options.minutes:
                load.stop()
                break
            await asyncio.to_thread(self._sample, now, load.done)
            done = now / (60 * self._options.minutes) if self._options.minutes else (
                load.done / self._options.requests
            )  # fmt: skip
            interval = max(0.2, now / max(done, 1e-3) / _SAMPLES)
            print(f"\r{now:6.0f} s  {load.done:8d} requests", end="", flush=True)
        print()

    def _sample(self, seconds: float, requests: int) -> None:
        pids = self._service.pids()
        sample = {
            "seconds": seconds,
            "requests": float(requests),
            "memory": anonymous_bytes(pids) / _MIB,
            "descriptors": float(open_descriptors(pids)),
        }
        if self._options.front_ends == 1:
            sample |= {name: float(count) for name, count in ask(self._counts).items()}
        if self._on_gpu:
            sample["gpu_memory"] = gpu_memory_mib()
        for name, value in sample.items():
            self._samples.setdefault(name, []).append(value)

    def _fit(self) -> list[dict[str, Any]]:
        start = int(_WARM_UP * len(self._samples["seconds"]))
        requests = self._samples["requests"][start:]
        rows = []
        for name, quantity in QUANTITIES.items():
            if name not in self._samples:
                continue
            trend = fit(requests, self._samples[name][start:])
            growth = trend.slope * (requests[-1] - requests[0])
            resolution = quantity.resolution
            if resolution < 1:
                resolution *= trend.first
            rows.append(
                {
                    "quantity": name,
                    "unit": quantity.unit,
                    "slope_per_100k_requests": round(1e5 * trend.slope, 3),
                    "standard_error": round(1e5 * trend.error, 3),
                    "first": round(trend.first, 1),
                    "last": round(trend.last, 1),
                    "growth_of_the_line": round(growth, 2),
                    "flat": trend.is_flat or growth < resolution,
                }
            )
        return rows

    def samples(self) -> dict[str, list[float]]:
        """Return all samples by quantity."""
        return {name: [round(v, 2) for v in values] for name, values in self._samples.items()}


def main() -> None:
    """Run, write the report and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=["model", "fake"], default="model")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, help="instead of --requests")
    parser.add_argument("--streams", type=int, default=16, help="requests in flight")
    parser.add_argument("--disconnects", action="store_true", help="30 %% of the clients leave")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--model", help="checkpoint; default: the bundled one")
    parser.add_argument("--load-format", choices=["auto", "dummy"])
    parser.add_argument("--serve", help="further options of `tessera serve`, in one argument")
    add_bookkeeping(parser)
    options = parser.parse_args()
    soak = Soak(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows, summary, failures = runner.run(soak.run())
    extra = {"summary": summary, "failures": failures, "samples": soak.samples()}
    write_report(
        "soak", rows, ("uvicorn", "uvloop", "torch"), device=options.device, folder=options.out,
        revision=options.commit, extra=extra, echo=False,
    )  # fmt: skip
    print("\n".join(f"{name}: {value}" for name, value in summary.items()))
    print(f"{'':12} {'slope per 100,000 requests':>34} {'first':>10} {'last':>10}")
    for row in rows:
        slope = f"{row['slope_per_100k_requests']:+.3f} ± {row['standard_error']:.3f} {row['unit']}"
        verdict = "flat" if row["flat"] else "GROWS"
        print(
            f"{row['quantity']:12} {slope:>34} {row['first']:10.1f} {row['last']:10.1f}  {verdict}"
        )
    for failure in failures:
        print("FAILED:", failure)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
