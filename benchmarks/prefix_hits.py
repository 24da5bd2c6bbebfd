"""Measures how many tokens of shared prefixes are found in prefix caches, beside those that one unlimited cache holds.

Serves on a free port, sends each prefix once, then requests that continue random ones.

    python -m benchmarks.prefix_hits [--prefixes 96] [--requests 960] [--clients 64] -- --data-parallel 2 --device cuda
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import free_port, serving
from server.cli.client.http_client import Client, RequestError, Target

_WORDS: Final = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "value",
    "index",
    "count",
    "total",
    "self",
    "none",
]
_PREFIX_WORDS: Final = 300
_TIMEOUT_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What a reply says of its request.

    Attributes:
        prefix: number of the prefix.
        failed: whether the status was not 200 or the connection broke.
        cached: prompt tokens found in a prefix cache.
        computed: the other prompt tokens.
    """

    prefix: int
    failed: bool = False
    cached: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that send requests to a service.

    Attributes:
        port: of the service, on this machine.
        clients: how many send at a time, each on a connection of its own.
        output_tokens: of a request.
    """

    port: int
    clients: int
    output_tokens: int = 16

    def send(self, prefixes: list[int]) -> list[Reply]:
        """Send a request for each number of a prefix; the texts after the prefixes differ."""
        return asyncio.run(self._send(prefixes))

    async def _send(self, prefixes: list[int]) -> list[Reply]:
        client = Client(Target("127.0.0.1", self.port, keep_alive=False))
        places = asyncio.Semaphore(self.clients)
        return await asyncio.gather(*(self._ask(client, places, it) for it in prefixes))

    async def _ask(self, client: Client, places: asyncio.Semaphore, prefix: int) -> Reply:
        parameters = {"max_new_tokens": self.output_tokens, "ignore_eos": True}
        async with places:
            body = {"inputs": f"{prefix_text(prefix)} {random.random()}", "parameters": parameters}
            try:
                async with asyncio.timeout(_TIMEOUT_SECONDS):
                    response = await client.request("POST", "/generate", json.dumps(body).encode())
            except (RequestError, TimeoutError):
                return Reply(prefix, failed=True)
        if response.status != 200:
            return Reply(prefix, failed=True)
        cached, computed = (
            int(response.headers.get(f"x-tessera-{kind}-prompt-tokens", 0))
            for kind in ("cached", "computed")
        )
        return Reply(prefix, cached=cached, computed=computed)


def prefix_text(number: int) -> str:
    """Return a text of about 350 tokens."""
    words = random.Random(number)
    return " ".join(words.choice(_WORDS) for _ in range(_PREFIX_WORDS))


def hit_rates(replies: list[Reply]) -> tuple[float, float]:
    """Return the share of prompt tokens found in caches, and that share over the one of an unlimited cache.

    An unlimited cache holds, for each prefix, what the luckiest request of that prefix found.
    """
    answered = [it for it in replies if not it.failed]
    most: Counter[int] = Counter()
    for it in answered:
        most[it.prefix] = max(most[it.prefix], it.cached)
    tokens = sum(it.cached + it.computed for it in answered)
    cached = sum(it.cached for it in answered)
    return cached / max(tokens, 1), cached / max(sum(most[it.prefix] for it in answered), 1)


def measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Load the service on a port and return a row of the report."""
    load = Load(port, options.clients)
    load.send(list(range(options.prefixes)))
    order = random.Random(1)
    numbers = [order.randrange(options.prefixes) for _ in range(options.requests)]
    start = time.perf_counter()
    replies = load.send(numbers)
    seconds = time.perf_counter() - start
    found, of_ideal = hit_rates(replies)
    return {
        "served": " ".join(options.served),
        "prefixes": options.prefixes,
        "requests": options.requests,
        "clients": options.clients,
        "failed": sum(it.failed for it in replies),
        "share_of_hits": round(found, 4),
        "share_of_ideal_hits": round(of_ideal, 4),
        "requests_per_s": round(options.requests / seconds, 1),
    }


def main() -> None:
    """Serve, measure and write the report; fails if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefixes", type=int, default=96)
    parser.add_argument("--requests", type=int, default=960)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("served", nargs="*", help="options of `tessera serve`, after --")
    add_bookkeeping(parser)
    options = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "server.cli.main", "serve", f"--port={port}", *options.served]
    with serving([*command, "--log-level=warning", "--access-log=off"], port):
        row = measure(port, options)
    device = "cuda" if any("cuda" in it for it in options.served) else "cpu"
    write_report("prefix-hits", [row], device=device, folder=options.out, revision=options.commit)
    if row["failed"]:
        sys.exit(f"{row['failed']} requests failed")


if __name__ == "__main__":
    main()
