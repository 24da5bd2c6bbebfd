"""Runs one attack while /health is requested, and finds out whether the service has recovered from it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from typing import TYPE_CHECKING

import httpx
import numpy as np

from tests.control import Control
from tests.reliability.managed_service import read_metrics
from tests.reliability.processes import anonymous_bytes, process_tree

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.attacks.record import Attack, Target

MAX_HEALTH_P99_MS = 100.0
"""On an idle machine; see `tests.control`."""
MAX_RSS_GROWTH_MIB = 50.0
_RECOVERY_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an attack did to the service.

    Attributes:
        id: of the attack.
        name: of the attack.
        error: the answer that was not as promised; None if all were.
        seconds: duration of the attack.
        probes: requests of /health during the attack.
        probes_failed: those that were not answered with 200.
        health_p50_ms: median time of the answers.
        health_p99_ms: 99th percentile.
        health_max_ms: longest.
        health_limit_ms: what the 99th percentile may be on a machine as busy as this one was.
        works_after: whether a request was served normally after the attack.
        blocks_free: blocks of the KV cache that are free after the attack.
        blocks_total: all blocks.
        rss_growth_mib: memory that all processes of the service hold in addition, less `Attack.started_mib`; None if
            it was started by someone else.
    """

    id: str
    name: str
    error: str | None
    seconds: float
    probes: int
    probes_failed: int
    health_p50_ms: float
    health_p99_ms: float
    health_max_ms: float
    health_limit_ms: float
    works_after: bool
    blocks_free: int
    blocks_total: int
    rss_growth_mib: float | None

    def faults(self) -> list[str]:
        """Return what is not as promised."""
        found = [] if self.error is None else [self.error]
        if self.probes_failed:
            found.append(f"{self.probes_failed} of {self.probes} requests of /health failed")
        if self.health_p99_ms > self.health_limit_ms:
            found.append(f"/health took {self.health_p99_ms:.0f} ms at p99")
        if not self.works_after:
            found.append("a request after the attack failed")
        if self.blocks_free != self.blocks_total:
            found.append(f"{self.blocks_total - self.blocks_free} blocks are not free")
        if self.rss_growth_mib is not None and self.rss_growth_mib > MAX_RSS_GROWTH_MIB:
            found.append(f"memory grew by {self.rss_growth_mib:.0f} MiB")
        return found


async def run_attack(attack: Attack, target: Target) -> Outcome:
    """Run an attack and return what it did."""
    await _works(target)  # what a first request allocates is not the attack's
    before, error = _memory_mib(target), None
    start = time.perf_counter()
    control = Control()
    async with _probe(target) as measured:
        try:
            with control:
                await attack.run(target)
        except AssertionError as failed:
            error = str(failed) or "an answer was not as promised"
    seconds = time.perf_counter() - start
    works = await _works(target)
    free, total = await _blocks(target)
    after = _memory_mib(target)
    times = [milliseconds for milliseconds, _ in measured] or [0.0]
    p50, p99 = np.percentile(times, (50, 99), method="higher").tolist()
    return Outcome(
        id=attack.id,
        name=attack.name,
        error=error,
        seconds=round(seconds, 2),
        probes=len(measured),
        probes_failed=sum(status != 200 for _, status in measured),
        health_p50_ms=round(p50, 2),
        health_p99_ms=round(p99, 2),
        health_max_ms=round(max(times), 2),
        health_limit_ms=round(1000 * control.allowed(MAX_HEALTH_P99_MS / 1000), 2),
        works_after=works,
        blocks_free=free,
        blocks_total=total,
        rss_growth_mib=(
            None
            if before is None or after is None
            else round(max(after - before - attack.started_mib, 0.0), 1)
        ),
    )


@contextlib.asynccontextmanager
async def _probe(target: Target) -> AsyncIterator[list[tuple[float, int | None]]]:
    """Run the probe; the list is filled at the end of the block."""
    measured: list[tuple[float, int | None]] = []
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.attacks.probe", target.host, str(target.port),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26,
    )  # fmt: skip
    try:
        await asyncio.sleep(0.3)  # until it runs
        yield measured
    finally:
        output, _ = await process.communicate(b"")
        measured += json.loads(output)


async def _works(target: Target) -> bool:
    """Return whether the service serves a request in the end."""
    body = {"inputs": "def f(", "parameters": {"max_new_tokens": 4}}
    deadline = time.monotonic() + _RECOVERY_SECONDS
    async with httpx.AsyncClient(timeout=_RECOVERY_SECONDS, headers=target.headers) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                reply = await client.post(f"{target.url}/generate", json=body)
                if reply.status_code == 200:
                    return True
            await asyncio.sleep(0.1)
    return False


async def _blocks(target: Target) -> tuple[int, int]:
    """Return the free and all blocks of the KV cache, once all are free or should be."""
    deadline = time.monotonic() + _RECOVERY_SECONDS
    async with httpx.AsyncClient(timeout=_RECOVERY_SECONDS, headers=target.headers) as client:
        while True:
            metrics = read_metrics((await client.get(f"{target.url}/metrics")).text)
            free, total = metrics["tessera_kv_blocks_free"], metrics["tessera_kv_blocks"]
            if free == total or time.monotonic() > deadline:
                return int(free), int(total)
            await asyncio.sleep(0.1)


def _memory_mib(target: Target) -> float | None:
    """Return the anonymous memory of all processes of the service."""
    if target.pid is None:
        return None
    return anonymous_bytes(process.pid for process in process_tree(target.pid)) / (1 << 20)
