"""Measures what overload costs: the time to the first token at 80 % and at 200 % of the sustainable rate.

A calibration keeps as many streams as the engine has places and counts the requests that end: the sustainable rate.
Then requests arrive at random times (Poisson) at shares of that rate, whether earlier ones have ended or not. A request
that is refused with 429 is sent once more after its `Retry-After`. `Retry-After` is compared with the time after which
an equal request was in fact admitted: that of the next admitted request, since all have the same lengths. A header has
whole seconds, so 1 is right for every shorter time.

    python -m tests.reliability.overload [--url http://gpu-host:8000] [--shares 0.8 2] [--max-queue-seconds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import statistics
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import service
from server.cli.bench.serve.apis import OpenAI, Options
from server.cli.bench.serve.load import Job, LoadGenerator
from server.cli.bench.serve.metrics import Distribution
from server.cli.client.http_client import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.cli.bench.serve.metrics import RequestRecord

_SEED = 0
_FIRST_ID, _LAST_ID = 100, 4000
_TIMEOUT = 300.0
_REFUSED: Final = "HTTP 429"


class Sent(NamedTuple):
    """Requests and what became of them.

    Attributes:
        first: requests, each of which was sent once.
        again: those of them that were refused and sent once more.
    """

    first: list[RequestRecord]
    again: list[RequestRecord]


class Load:
    """Sends requests of equal lengths, each on a connection of its own.

    Args:
        url: of the service.
        prompt_tokens: length of the prompts.
        max_tokens: length of the answers.
    """

    def __init__(self, url: str, prompt_tokens: int, max_tokens: int) -> None:
        target = dataclasses.replace(Target.from_url(url), keep_alive=False)
        self._api = OpenAI()
        self._generator = LoadGenerator(target, self._api, _TIMEOUT)
        with urllib.request.urlopen(f"{url}/v1/models") as reply:  # noqa: S310 - the service's
            self._options = Options(json.load(reply)["data"][0]["id"])
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._random = random.Random(_SEED)

    async def keep_streams(self, streams: int, seconds: float) -> list[RequestRecord]:
        """Keep a number of requests in progress."""
        stop = time.perf_counter() + seconds
        jobs = itertools.takewhile(lambda _: time.perf_counter() < stop, self._jobs())
        return await self._generator.keep_streams(jobs, streams)

    async def arrive(self, rate: float, seconds: float) -> Sent:
        """Send requests at random times, and those that are refused once more."""
        sent = Sent([], [])
        tasks = set()
        at, stop = time.perf_counter(), time.perf_counter() + seconds
        while (at := at + self._random.expovariate(rate)) < stop:
            await asyncio.sleep(at - time.perf_counter())
            tasks.add(asyncio.create_task(self._send_twice(sent)))
        await asyncio.gather(*tasks)
        return sent

    async def _send_twice(self, sent: Sent) -> None:
        sent.first.append(record := await self._generator.send(next(self._jobs())))
        if record.retry_after is not None:
            await asyncio.sleep(record.retry_after)
            sent.again.append(await self._generator.send(next(self._jobs())))

    def _jobs(self) -> Iterator[Job]:
        while True:
            prompt = [self._random.randint(_FIRST_ID, _LAST_ID) for _ in range(self._prompt_tokens)]
            body = self._api.body(prompt, self._max_tokens, self._options)
            yield Job(body, self._max_tokens, self._prompt_tokens)


def judge_delays(sent: Sent) -> dict[str, Any]:
    """Compare each Retry-After with the time after which an equal request was admitted."""
    records = sent.first + sent.again
    admitted = sorted(it.started for it in records if it.error is None)
    ratios, num_right = [], 0
    for refused in records:
        later = [at for at in admitted if at > refused.started]
        if refused.retry_after is None or not later:
            continue  # not refused, or no later request
        actual = max(1.0, later[0] - refused.started)
        ratios.append(refused.retry_after / actual)
        num_right += 0.5 <= ratios[-1] <= 2.0
    return {
        "retry_after_right": round(num_right / len(ratios), 3) if ratios else None,
        "retry_after_median_ratio": round(statistics.median(ratios), 2) if ratios else None,
        "retries": len(sent.again),
        "retries_admitted": round(sum(it.error is None for it in sent.again) / len(sent.again), 3)
        if sent.again
        else None,
    }


def summarize(share: float, rate: float, seconds: float, sent: Sent) -> dict[str, Any]:
    """Return a row of the report."""
    records = sent.first + sent.again
    ttft = Distribution.of_seconds([it.ttft for it in records if it.error is None])
    refused = [it for it in records if it.error == _REFUSED]
    refusals = Distribution.of_seconds([it.ended - it.started for it in refused])
    assert ttft is not None
    return {
        "share": share,
        "requests_per_second": round(rate * share, 2),
        "requests": len(records),
        "served": ttft.count,
        "served_per_second": round(ttft.count / seconds, 2),
        "refused": len(refused),
        "neither": len(records) - ttft.count - len(refused),
        "refused_without_retry_after": sum(it.retry_after is None for it in refused),
        "refusal_p99_ms": round(refusals.percentiles[99], 1) if refusals else None,
        "ttft_p50_ms": round(ttft.percentiles[50], 1),
        "ttft_p99_ms": round(ttft.percentiles[99], 1),
        **judge_delays(sent),
    }


async def measure(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Calibrate, then measure each share."""
    load = Load(url, options.prompt_tokens, options.max_tokens)
    await load.keep_streams(options.streams, options.seconds / 4)  # compiles, and measures rates
    start = time.perf_counter()
    ended = await load.keep_streams(options.streams, options.seconds)
    rate = sum(it.error is None for it in ended) / (time.perf_counter() - start)
    print(f"sustainable: {rate:.2f} requests per second", flush=True)
    rows = []
    for share in options.shares:
        sent = await load.arrive(share * rate, options.seconds)
        rows.append(summarize(share, rate, options.seconds, sent))
    for row in rows:
        row["ttft_p99_ratio"] = round(row["ttft_p99_ms"] / rows[0]["ttft_p99_ms"], 2)
    return rows


@contextlib.contextmanager
def _service(options: argparse.Namespace) -> Iterator[str]:
    if options.url is not None:
        yield options.url.rstrip("/")
        return
    settings = [f"--max-queue-seconds={options.max_queue_seconds}", *options.serve]
    with service(settings) as (url, _):
        yield url


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="service to measure, instead of one with the bundled model")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 2.0])
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--streams", type=int, default=16, help="of the calibration")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--max-queue-seconds", type=float, default=1.0, help="of the service")
    parser.add_argument("--serve", nargs="*", default=[], help="further options of the service")
    parser.add_argument("--device", default="cpu", help="of the service: cpu or cuda")
    add_bookkeeping(parser)
    options = parser.parse_args()
    with _service(options) as url:
        rows = asyncio.run(measure(url, options))
    write_report(
        "overload",
        rows,
        ("torch",),
        device=options.device,
        folder=options.out,
        revision=options.commit,
    )


if __name__ == "__main__":
    main()
