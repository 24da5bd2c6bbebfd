"""The parts of the measurement: each deploys the service, loads it, does something to it and returns a row."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import prefix_hits
from benchmarks.ray_service import writes
from benchmarks.ray_service.cluster import (
    PORT,
    PROXY,
    REPLICA,
    SETTINGS,
    both_replicas,
    cpu_seconds,
    deploy,
    processes,
    reached_by_proxy,
    requests_of_replicas,
    running,
    until,
)
from benchmarks.ray_service.streams import Load, summary
from benchmarks.service import service
from tests.reliability.processes import Role, process_tree

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

_CACHED_PREFIXES: Final = 96
"""Prefixes of the part hits: about 350 tokens each, twice what a replica's cache holds."""
_CACHED_REQUESTS: Final = 576
_CACHED_CLIENTS: Final = 8
_PLACES: Final = 8
"""Sequences that a replica of the part autoscale computes at a time."""


def hits(rule: str, _: argparse.Namespace) -> dict[str, Any]:
    """Measure the hits of the prefix caches after a first pass that fills them."""
    deploy(rule)
    run = prefix_hits.Load(PORT, _CACHED_CLIENTS)
    order = random.Random(1)
    numbers = [order.randrange(_CACHED_PREFIXES) for _ in range(_CACHED_REQUESTS)]
    run.send(numbers[: 2 * _CACHED_PREFIXES])
    before = requests_of_replicas()
    replies = run.send(numbers)
    after = requests_of_replicas()
    return {
        "requests": len(replies),
        "failed": sum(it.failed for it in replies),
        "share_of_hits": round(prefix_hits.hit_rates(replies)[0], 3),
        "requests_of_replicas": sorted(after[name] - before.get(name, 0) for name in after),
    }


def load(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Send streams through the proxy; the same to `tessera serve` for comparison."""
    deploy(rule)
    warm = Load(PORT, options.streams, options.streams)
    warm.start()
    warm.join()
    pids = {"proxy": processes(PROXY), "replicas": processes(REPLICA)}
    row = _timed(PORT, options, pids)
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in SETTINGS.items()
        if name not in ("model", "cpus")
    ]
    with service(flags) as (url, _):
        (parent,) = [it for it in process_tree(os.getpid()) if _is_service(it.pid, url)]
        direct = _timed(int(url.rsplit(":", 1)[1]), options, {"direct": [parent.pid]})
    return row | {name: value for name, value in direct.items() if name.startswith("direct")}


def _is_service(pid: int, url: str) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return f"--port={url.rsplit(':', 1)[1]}".encode() in words and b"serve" in words


def _timed(port: int, options: argparse.Namespace, pids: dict[str, list[int]]) -> dict[str, Any]:
    before = {name: sum(map(cpu_seconds, group)) for name, group in pids.items()}
    run = Load(port, options.streams, options.requests)
    start = time.perf_counter()
    run.start()
    streams = run.join()
    seconds = time.perf_counter() - start
    tokens = sum(it.output_tokens for it in streams)
    row = summary(streams) | {"tokens_per_second": round(tokens / seconds)}
    for name, group in pids.items():
        used = sum(map(cpu_seconds, group)) - before[name]
        row[f"{name}_cpu_us_per_token"] = round(1e6 * used / tokens, 1)
    return row


def kill_engine(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Kill the engine of one replica under load."""
    deploy(rule)
    (pid, *_) = (it.pid for it in process_tree(both_replicas()[0]) if it.role is Role.ENGINE)
    return _killed(pid, options, lambda: None)


def kill_replica(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Kill one replica under load, and wait until there are two again."""
    deploy(rule)
    old = both_replicas()
    start: list[float] = []

    def wait() -> None:
        start.append(time.perf_counter())
        # A new process: until there is one, Ray may count the killed replica.
        until(lambda: set(processes(REPLICA)) - set(old) and running() == 2)
        start.append(time.perf_counter())

    row = _killed(old[0], options, wait)
    return row | {"replaced_after_s": round(start[1] - start[0], 1)}


def _killed(pid: int, options: argparse.Namespace, wait: Callable[[], None]) -> dict[str, Any]:
    run = Load(PORT, options.streams)
    run.start()
    until(lambda: run.ended >= options.streams)
    fault = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    wait()
    until(lambda: run.ended >= options.requests)
    run.stop()
    return summary(run.join(), fault)


def kill_replicas(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Kill several replicas, one after the other, under clients that send bodies in several ways."""
    deploy(rule)
    both_replicas()
    clients = writes.Clients(PORT, options.streams)
    clients.start()
    for kill in range(options.kills):
        count = (kill + 1) * options.requests // (options.kills + 1)
        until(lambda count=count: len(clients.outcomes) >= count)  # type: ignore[misc]
        until(lambda: running() == reached_by_proxy() == 2 and len(processes(REPLICA)) == 2)
        # What the proxy sent elsewhere while it did not know the new one.
        count = len(clients.outcomes) + 2 * options.streams
        until(lambda count=count: len(clients.outcomes) >= count)  # type: ignore[misc]
        old = processes(REPLICA)
        os.kill(old[kill % 2], signal.SIGKILL)
        until(lambda old=old: set(processes(REPLICA)) - set(old) and running() == 2)  # type: ignore[misc]
    until(lambda: len(clients.outcomes) >= options.requests)
    clients.stop()
    return {"kills": options.kills} | writes.summary(clients.outcomes)


def update(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Replace both replicas under load."""
    deploy(rule)
    return _changed(rule, options, max_num_seqs=33)


def scale_down(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Go from two replicas to one under load."""
    deploy(rule)
    return _changed(rule, options, replicas=1)


def _changed(rule: str, options: argparse.Namespace, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - of `deploy`
    old = set(both_replicas())
    run = Load(PORT, options.streams)
    run.start()
    until(lambda: run.ended >= options.streams)
    deploy(rule, **changes)
    until(lambda: len(old.intersection(processes(REPLICA))) == changes.get("replicas", 0))
    count = run.ended + options.requests
    until(lambda: run.ended >= count)
    run.stop()
    return summary(run.join())


def autoscale(rule: str, _: argparse.Namespace) -> dict[str, Any]:
    """Load one replica until there are two, then wait until there is one."""
    limits = {"min_replicas": 1, "max_replicas": 2, "max_num_seqs": _PLACES}
    deploy(rule, **limits, upscale_delay=5, downscale_delay=10)
    until(lambda: running() == 1)
    run = Load(
        PORT, _PLACES + _PLACES // 2
    )  # one replica admits them all: half as many as it computes wait
    run.start()
    seconds = [time.perf_counter()]
    until(lambda: running() == 2)
    seconds.append(time.perf_counter())
    time.sleep(10)
    run.stop()
    streams = run.join()
    seconds.append(time.perf_counter())
    until(lambda: running() == 1)
    seconds.append(time.perf_counter())
    return summary(streams) | {
        "second_after_s": round(seconds[1] - seconds[0], 1),
        "one_again_after_s": round(seconds[3] - seconds[2], 1),
    }


PARTS: Final[dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]]] = {
    "hits": hits,
    "load": load,
    "engine": kill_engine,
    "replica": kill_replica,
    "writes": kill_replicas,
    "update": update,
    "scale-down": scale_down,
    "autoscale": autoscale,
}
