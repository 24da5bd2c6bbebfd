"""Breaks a service under load, again and again, and checks that every client gets a final status.

A mixed load of all dialects, with random lengths, deadlines and disconnects, runs the whole time, while faults follow
each other in a random order that the seed decides (`tests.reliability.faults` has the list). The conditions:

- every request gets a status, a last event of its stream, or a connection that a killed process closed, before its
  deadline plus the margin; time in which a fault keeps the service from answering does not count;
- the service serves again after every fault;
- at the end all blocks of the KV cache are free, no request runs or waits, the service leaves no files behind, and the
  processes' anonymous memory is within 50 MiB of that at the start; processes that compile grammars, which start with
  the first grammar a front end gets, count apart: each has at most 80 MiB.

Exits with status 1 if a condition does not hold. As root, the log and the temporary files are on a file system of 64
MiB, which is filled; without root, `RLIMIT_FSIZE` makes writes to files fail. Clock steps need the Debian package
`faketime`.

    python -m tests.reliability.chaos [--minutes 15] [--front-ends 2] [--seed 1] [--events kill-engine slow-clients]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import add_bookkeeping, write_report
from tests.reliability.faults import (
    FAULTS,
    NotPossibleError,
    Target,
    fake_clock,
    mount_small_disk,
    unmount,
)
from tests.reliability.load import Faults, Load, random_requests, wait_until
from tests.reliability.managed_service import ManagedService
from tests.reliability.processes import Role, anonymous_bytes, open_descriptors

_MIB = 1 << 20
_MAX_GROWTH_MIB = 50.0
_MAX_GRAMMAR_WORKER_MIB = 80.0
_MAX_DESCRIPTORS = 1024
_WARM_UP_SECONDS = 15.0
_HANG_SECONDS = 10.0
_IDLE_SECONDS = 60.0
_FAILED = ("NOT SERVED", "NOT REPLACED", "ORPHANS")


def is_idle(metrics: dict[str, float]) -> bool:
    """Whether no request is in flight and all blocks are free."""
    return (
        metrics["tessera_requests_in_flight"] <= 0
        and metrics["tessera_requests_running"] == 0
        and metrics["tessera_requests_waiting"] == 0
        and metrics["tessera_kv_blocks_free"] == metrics["tessera_kv_blocks"]
    )


class Chaos:
    """One run.

    Args:
        options: of the command line.
        service: not started yet.
        small_disk: whether the service's folder is a small file system.
        clock_file: see `Target`.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        service: ManagedService,
        *,
        small_disk: bool,
        clock_file: Path | None,
    ) -> None:
        self._options = options
        self._service = service
        rng = random.Random(options.seed)
        self._rng = rng
        self._faults = Faults()
        pause = min(5.0, 2.0 + options.minutes / 5)
        self._target = Target(
            service, self._faults, rng, pause, _HANG_SECONDS, small_disk, clock_file
        )
        requests = random_requests(
            random.Random(options.seed + 1), disconnects=0.15, max_tokens=options.max_tokens
        )
        self._load = Load(
            service.port, requests, options.clients, self._faults, options.margin, rng
        )
        self.events: list[dict[str, Any]] = []
        self.failures: list[str] = []

    async def run(self) -> dict[str, Any]:
        """Run all of it; return the summary."""
        await asyncio.to_thread(self._service.wait_until_ready)
        self._load.start()
        await asyncio.sleep(_WARM_UP_SECONDS)
        before = await self._rest("before the first fault")
        self._load.start()
        began = time.monotonic()
        names: list[str] = []
        while time.monotonic() - began < 60 * self._options.minutes:
            if not names:
                names = list(self._options.events)
                self._rng.shuffle(names)
            await self._break(names.pop())
            await asyncio.sleep(self._rng.uniform(0.5, 2))
        await asyncio.sleep(_WARM_UP_SECONDS / 3)
        after = await self._rest("at the end")
        growth = (after["anonymous_bytes"] - before["anonymous_bytes"]) / _MIB
        if growth > _MAX_GROWTH_MIB:
            self.failures.append(f"memory grew by {growth:.1f} MiB")
        worker = max(before["grammar_worker_bytes"], after["grammar_worker_bytes"]) / _MIB
        if worker > _MAX_GRAMMAR_WORKER_MIB:
            self.failures.append(f"a process that compiles grammars has {worker:.1f} MiB")
        if self._load.violations:
            self.failures.append(f"{len(self._load.violations)} requests broke the contract")
        log = self._service.log.read_text(errors="replace")
        code = await asyncio.to_thread(self._service.stop)
        if code != 0:
            self.failures.append(f"the service ended with status {code}")
        if left := self._service.leftover_files():
            self.failures.append(f"{len(left)} files or folders are left in the temporary folder")
        return {
            "requests": sum(self._load.outcomes.values()),
            "violations": len(self._load.violations),
            "max_seconds_past_deadline": round(self._load.max_overrun, 2),
            "memory_growth_mib": round(growth, 1),
            "largest_grammar_worker_mib": round(worker, 1),
            "descriptor_growth": after["descriptors"] - before["descriptors"],
            "tracebacks_in_log": log.count("Traceback (most recent call last)"),
            "leftover_files": len(left),
            "passed": not self.failures,
        }

    async def _break(self, name: str) -> None:
        """Inject one fault and note what came of it."""
        outcomes, violations = self._load.outcomes.copy(), len(self._load.violations)
        began = time.monotonic()
        try:
            result = await FAULTS[name](self._target)
        except NotPossibleError as error:
            result = f"not possible: {error}"
        if self._service.process.poll() is not None:
            result += f", THE SERVICE ENDED ({self._service.process.returncode})"
            self.failures.append(f"{name} ended the service")
            with self._faults.during(
                self._faults.closures, self._faults.losses, self._faults.delays
            ):
                self._service.start()
                await asyncio.to_thread(self._service.wait_until_ready)
        elif any(word in result for word in _FAILED):
            self.failures.append(f"{name}: {result}")
        broken = [str(v) for v in self._load.violations[violations:][:5]]
        event = {
            "event": name,
            "seconds": round(time.monotonic() - began, 1),
            "result": result,
            "outcomes": dict(self._load.outcomes - outcomes),
            "violations": broken,
        }
        self.events.append(event)
        print(f"{name:18} {event['seconds']:6.1f} s  {result}  {event['outcomes']}", flush=True)
        for violation in broken:
            print("    BROKEN:", violation, flush=True)

    async def _rest(self, when: str) -> dict[str, int]:
        """Stop the load, wait until nothing is in flight, and measure."""
        await self._load.stop()
        idle = await wait_until(lambda: is_idle(self._service.metrics()), _IDLE_SECONDS)
        if idle is None:
            self.failures.append(f"{when} requests or blocks are held {_IDLE_SECONDS:.0f} s later")
        await asyncio.sleep(1)
        processes = self._service.processes()
        workers = [it.pid for it in processes if it.role is Role.GRAMMAR_WORKER]
        pids = [it.pid for it in processes if it.role is not Role.GRAMMAR_WORKER]
        return {
            "anonymous_bytes": anonymous_bytes(pids),
            "descriptors": open_descriptors(pids),
            "grammar_worker_bytes": max((anonymous_bytes([pid]) for pid in workers), default=0),
        }

    def violations(self) -> list[str]:
        """Return the first violations as text."""
        return [str(violation) for violation in self._load.violations[:50]]

    def outcomes(self) -> dict[str, int]:
        """Return the number of requests by outcome."""
        return dict(self._load.outcomes.most_common())


def main() -> None:
    """Run, print the tables and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--front-ends", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=12, help="requests in flight")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--margin", type=float, default=15.0, help="seconds a status may be late")
    parser.add_argument("--events", nargs="+", choices=sorted(FAULTS), default=list(FAULTS))
    add_bookkeeping(parser)
    options = parser.parse_args()
    # A pipe that is cut must not leave a service behind: exit through the `finally` blocks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    small_disk = mount_small_disk(folder, "64m")
    variables, clock_file = fake_clock(folder)
    service = ManagedService(
        [
            "--device=cpu", f"--frontends={options.front_ends}", f"--engine-hang-seconds={_HANG_SECONDS}",
            "--max-num-seqs=32",
        ],
        variables, max_descriptors=_MAX_DESCRIPTORS, folder=folder,
    )  # fmt: skip
    chaos = Chaos(options, service, small_disk=small_disk, clock_file=clock_file)
    try:
        service.start()
        summary = asyncio.run(chaos.run())
    finally:
        service.close()
        if small_disk:
            unmount(folder)
        folder.rmdir() if small_disk else None
    print("\noutcomes of the requests")
    for outcome, count in chaos.outcomes().items():
        print(f"  {count:7d}  {outcome}")
    extra = {"seed": options.seed, "outcomes": chaos.outcomes(), "violations": chaos.violations()}
    extra["failures"] = chaos.failures
    libraries = ("uvicorn", "uvloop", "torch")
    print()
    print("\n".join(f"{name}: {value}" for name, value in summary.items()))
    for failure in chaos.failures:
        print("FAILED:", failure)
    write_report(
        "chaos", [summary, *chaos.events], libraries, folder=options.out, revision=options.commit,
        extra=extra, echo=False,
    )  # fmt: skip
    if chaos.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
