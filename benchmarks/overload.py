"""Measures what overload costs: the time to the first token at 80 % and at 200 % of the sustainable rate.

A calibration keeps as many streams as the engine has places and counts the requests that end: the sustainable rate.
Then requests arrive at random times (Poisson) at shares of that rate, whether earlier ones have ended or not. A request
that is refused with 429 is sent once more after its `Retry-After`. `Retry-After` is compared with the time after which
an equal request was in fact admitted: that of the next admitted request, since all have the same lengths. A header has
whole seconds, so 1 is right for every shorter time.

    python -m benchmarks.overload [--url http://gpu-host:8000] [--shares 0.8 2] [--max-queue-seconds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import statistics
import time
import urllib.request
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import service

if TYPE_CHECKING:
    from collections.abc import Iterator

_SEED = 0
_FIRST_ID, _LAST_ID = 100, 4000
_TIMEOUT = 300.0


@dataclasses.dataclass(slots=True)
class Sent:
    """One request and its answer.

    Attributes:
        at: when it was sent, `time.perf_counter` seconds.
        status: of the response; 0 if there was none.
        retry_after: value of the header, if it was refused.
        first: when the first token arrived.
        end: when the response ended.
        is_retry: whether it was refused before.
    """

    at: float
    status: int = 0
    retry_after: int | None = None
    first: float | None = None
    end: float = 0.0
    is_retry: bool = False


class Load:
    """Sends requests of equal lengths.

    Args:
        url: of the service.
        prompt_tokens: length of the prompts.
        max_tokens: length of the answers.
    """

    def __init__(self, url: str, prompt_tokens: int, max_tokens: int) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port or 80
        with urllib.request.urlopen(f"{url}/v1/models") as reply:  # noqa: S310 - the service's
            self._model = json.load(reply)["data"][0]["id"]
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._random = random.Random(_SEED)

    async def keep_streams(self, streams: int, seconds: float) -> list[Sent]:
        """Keep a number of requests in progress."""
        stop = time.perf_counter() + seconds
        sent: list[Sent] = []

        async def work() -> None:
            while time.perf_counter() < stop:
                sent.append(await self.send())

        await asyncio.gather(*(work() for _ in range(streams)))
        return sent

    async def arrive(self, rate: float, seconds: float) -> list[Sent]:
        """Send requests at random times, and those that are refused once more."""
        sent: list[Sent] = []
        tasks = set()
        at, stop = time.perf_counter(), time.perf_counter() + seconds
        while (at := at + self._random.expovariate(rate)) < stop:
            await asyncio.sleep(at - time.perf_counter())
            tasks.add(asyncio.create_task(self._send_twice(sent)))
        await asyncio.gather(*tasks)
        return sent

    async def _send_twice(self, sent: list[Sent]) -> None:
        sent.append(first := await self.send())
        if first.retry_after is not None:
            await asyncio.sleep(first.retry_after)
            again = await self.send()
            again.is_retry = True
            sent.append(again)

    async def send(self) -> Sent:
        """Send one request and read its answer."""
        sent = Sent(time.perf_counter())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            async with asyncio.timeout(_TIMEOUT):
                await self._exchange(sent)
        sent.end = time.perf_counter()
        return sent

    async def _exchange(self, sent: Sent) -> None:
        prompt = [self._random.randint(_FIRST_ID, _LAST_ID) for _ in range(self._prompt_tokens)]
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + data)
            status = int((await reader.readline()).split()[1])
            while (line := (await reader.readline()).lower().strip()) != b"":
                if line.startswith(b"retry-after:"):
                    sent.retry_after = int(line.split(b":")[1])
            async for line in reader:
                if line.startswith(b"data:") and sent.first is None:
                    sent.first = time.perf_counter()
            sent.status = status
        finally:
            writer.close()


def percentile(values: list[float], share: float) -> float:
    """Return a percentile of values, of which there is at least one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def judge_delays(sent: list[Sent]) -> dict[str, Any]:
    """Compare each Retry-After with the time after which an equal request was admitted."""
    admitted = sorted(s.at for s in sent if s.status == 200)
    ratios, num_right = [], 0
    for refused in (s for s in sent if s.retry_after is not None):
        later = [at for at in admitted if at > refused.at]
        if not later:
            continue  # nobody asked again
        assert refused.retry_after is not None
        actual = max(1.0, later[0] - refused.at)
        ratios.append(refused.retry_after / actual)
        num_right += 0.5 <= ratios[-1] <= 2.0
    retries = [s for s in sent if s.is_retry]
    return {
        "retry_after_right": round(num_right / len(ratios), 3) if ratios else None,
        "retry_after_median_ratio": round(statistics.median(ratios), 2) if ratios else None,
        "retries": len(retries),
        "retries_admitted": round(sum(s.status == 200 for s in retries) / len(retries), 3)
        if retries
        else None,
    }


def summarize(share: float, rate: float, seconds: float, sent: list[Sent]) -> dict[str, Any]:
    """Return a row of the report."""
    served = [s for s in sent if s.status == 200 and s.first is not None]
    ttft = [s.first - s.at for s in served if s.first is not None]
    refused = [s for s in sent if s.status == 429]
    others = len(sent) - len(served) - len(refused)
    return {
        "share": share,
        "requests_per_second": round(rate * share, 2),
        "requests": len(sent),
        "served": len(served),
        "served_per_second": round(len(served) / seconds, 2),
        "refused": len(refused),
        "neither": others,
        "refused_without_retry_after": sum(s.retry_after is None for s in refused),
        "refusal_p99_ms": round(1e3 * percentile([s.end - s.at for s in refused], 0.99), 1)
        if refused
        else None,
        "ttft_p50_ms": round(1e3 * percentile(ttft, 0.5), 1),
        "ttft_p99_ms": round(1e3 * percentile(ttft, 0.99), 1),
        **judge_delays(sent),
    }


async def measure(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Calibrate, then measure each share."""
    load = Load(url, options.prompt_tokens, options.max_tokens)
    await load.keep_streams(options.streams, options.seconds / 4)  # compiles, and measures rates
    start = time.perf_counter()
    ended = await load.keep_streams(options.streams, options.seconds)
    rate = sum(s.status == 200 for s in ended) / (time.perf_counter() - start)
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
