"""Clients that send one stream after the other while a part changes the service, and what became of the streams."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from benchmarks.prefix_hits import prefix_text
from server.cli.bench.serve.apis import TGI
from server.cli.bench.serve.load import Job, LoadGenerator
from server.cli.client.http_client import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.cli.bench.serve.metrics import RequestRecord

COMPLETE: Final = "complete"
TIMEOUT_SECONDS: Final = 180.0
_TOKENS: Final = 64
_PREFIXES: Final = 16


class Load:
    """Clients in a thread of their own, each of which sends one stream after the other on a connection of its own.

    Args:
        port: of the service.
        clients: how many there are.
        requests: how many streams are sent; None for as many as come before `stop`.
    """

    def __init__(self, port: int, clients: int, requests: int | None = None) -> None:
        self._target = Target("127.0.0.1", port, keep_alive=False)
        self._clients = clients
        self._requests = requests
        self._begun = 0
        self._stopped = False
        self._pool = ThreadPoolExecutor(1)
        self._records: Future[list[RequestRecord]]

    def start(self) -> None:
        """Start the clients."""
        self._records = self._pool.submit(asyncio.run, self._send())

    def stop(self) -> None:
        """Send no further streams."""
        self._stopped = True

    def join(self) -> list[RequestRecord]:
        """Return the streams when all have ended."""
        records = self._records.result()
        self._pool.shutdown()
        return records

    @property
    def ended(self) -> int:
        """Number of streams that have ended, whole or not."""
        return max(0, self._begun - self._clients)  # a client begins the next when one has ended

    async def _send(self) -> list[RequestRecord]:
        generator = LoadGenerator(self._target, TGI(), TIMEOUT_SECONDS)
        return await generator.keep_streams(self._jobs(), self._clients)

    def _jobs(self) -> Iterator[Job]:
        choices = random.Random(0)
        while not self._stopped and self._begun != self._requests:
            self._begun += 1
            text = f"{prefix_text(choices.randrange(_PREFIXES))} {choices.random()}"
            parameters = {"max_new_tokens": _TOKENS, "ignore_eos": True}
            body = json.dumps({"inputs": text, "parameters": parameters}).encode()
            yield Job(body, _TOKENS, 0)


def outcome(record: RequestRecord) -> str:
    """Return `COMPLETE`, or how the stream failed.

    "error event: ..." names the service's error, "HTTP ..." a status. "connection lost" is a connection that ended
    within the stream, "cannot connect" one that was refused, "stream ended early" a response that ended in order, but
    without its last event.
    """
    if record.error is not None:
        return record.error
    return COMPLETE if record.output_tokens == _TOKENS else f"{record.output_tokens} tokens"


def summary(records: list[RequestRecord], fault: float | None = None) -> dict[str, Any]:
    """Return a row's counts.

    Args:
        records: all streams of a part.
        fault: `time.perf_counter()` at which something was killed. Then the row also has the streams in flight, the
            failed ones that began later, and after how many seconds the last client was told of its failure.
    """
    outcomes = Counter(map(outcome, records))
    failed = [it for it in records if outcome(it) != COMPLETE]
    row: dict[str, Any] = {
        "requests": len(records),
        "failed": len(failed),
        "outcomes": dict(outcomes.most_common()),
    }
    if fault is not None:
        row["failed_begun_after"] = sum(it.started > fault for it in failed)
        row["in_flight"] = sum(it.started <= fault < it.ended for it in records)
        row["told_after_s"] = round(max((it.ended - fault for it in failed), default=0.0), 2)
    return row
