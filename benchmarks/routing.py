"""Simulates several engines, to compare rules by which requests are divided among them.

The router is the real one (`server.engine.link.front_end.routing`), the engines are arithmetic: a step takes a
constant, a time for each sequence that decodes and one for each prompt token that it computes, at most as many as a
step's budget. The defaults are about those of a model of 0.6 billion parameters on one H100. Each client sends its next
request when it has the reply to the last. The result is the throughput in units of a single engine's with its share of
the clients, and the prompt tokens found in prefix caches in units of what one unlimited cache would find.

    python -m benchmarks.routing [--engines 2] [--clients 64 256 1024]
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from benchmarks.report import add_bookkeeping, write_report
from server.engine.link.front_end.routing import PrefixIndex, Router, block_keys

BLOCK: Final = 16
NUM_BLOCKS: Final = 40_000
BUDGET: Final = 1024
STEP_SECONDS, SEQUENCE_SECONDS, PROMPT_TOKEN_SECONDS = 1.6e-3, 15e-6, 6e-6
_VOCABULARY = 50_000
_OUTPUT_TOKENS = (64, 192)
RULES: Final = {
    "load": (0, 0.0, False),
    "gap 8": (8, 1.5, True),
    "gap 16": (16, 1.5, True),
    "gap 64": (64, 1.5, True),
    "prefix": (1 << 40, math.inf, True),
}
"""By name: the bounds of the router, and whether it follows prefixes at all."""


class Load(NamedTuple):
    """Prompts of a random prefix, out of some that are common, and random tokens.

    Attributes:
        prefixes: how many common prefixes there are, of which number k is chosen with a probability of k to `-skew`.
        shared, own: tokens of the prefix, and of the rest.
    """

    prefixes: int
    shared: int
    own: int
    skew: float = 0.0


LOADS: Final = {
    "no prefixes": Load(1, 0, 256),
    "1 prefix of 1024": Load(1, 1024, 64),
    "16 prefixes of 2048, skewed": Load(16, 2048, 64, 1.0),
    "96 prefixes of 352": Load(96, 352, 48),
    "400 prefixes of 1024": Load(400, 1024, 64),
}


@dataclass(eq=False, slots=True)
class _Sequence:
    client: int
    keys: list[int]
    prompt: int
    output: int


@dataclass(eq=False, slots=True)
class _Engine:
    """An engine with a prefix cache, whose steps have a duration and no content."""

    cache: PrefixIndex
    waiting: deque[_Sequence] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)
    found: int = 0

    def step(self) -> tuple[float, list[int]]:
        """Return the duration of a step, and the clients that have their reply after it."""
        decoding = [it for it in self.running if not it.prompt]
        left = BUDGET - len(decoding)
        while self.waiting and left > sum(it.prompt for it in self.running):
            sequence = self.waiting.popleft()
            found = min(self.cache.match(sequence.keys) * BLOCK, sequence.prompt - 1)
            self.cache.add(sequence.keys)
            self.found += found
            sequence.prompt -= found
            self.running.append(sequence)
        computed = 0
        for sequence in self.running:
            tokens = min(sequence.prompt, left - computed)
            sequence.prompt -= tokens
            computed += tokens
        for sequence in decoding:
            sequence.output -= 1
        ended = [it.client for it in decoding if not it.output]
        self.running = [it for it in self.running if it.output]
        seconds = STEP_SECONDS + SEQUENCE_SECONDS * len(decoding) + PROMPT_TOKEN_SECONDS * computed
        return seconds, ended


def simulate(
    load: Load, rule: tuple[int, float, bool], num_engines: int, clients: int, total: int
) -> tuple[float, float]:
    """Serve a number of requests.

    Returns:
        The requests per second, and the prompt tokens found in prefix caches.
    """
    rng = random.Random(1)
    prefixes = [
        [rng.randrange(_VOCABULARY) for _ in range(load.shared)] for _ in range(load.prefixes)
    ]
    weights = [(k + 1) ** -load.skew for k in range(load.prefixes)]
    max_gap, max_ratio, follows = rule
    router = Router(num_engines, BLOCK, max_gap, max_ratio)
    engines = [_Engine(PrefixIndex(NUM_BLOCKS)) for _ in range(num_engines)]
    for i in range(num_engines):
        router.begin(i, NUM_BLOCKS if follows else 0)
    loads = [0] * num_engines
    numbers = itertools.count()
    events: list[tuple[float, int, int, list[int]]] = []
    idle = set(range(num_engines))

    def send(client: int, now: float) -> None:
        (prefix,) = rng.choices(prefixes, weights)
        prompt = prefix + [rng.randrange(_VOCABULARY) for _ in range(load.own)]
        chosen = router.choose(prompt, None, loads, range(num_engines))
        loads[chosen] += 1
        keys = block_keys(prompt, BLOCK, None)
        sequence = _Sequence(client, keys, len(prompt), rng.randint(*_OUTPUT_TOKENS))
        engines[chosen].waiting.append(sequence)
        if chosen in idle:
            idle.remove(chosen)
            heapq.heappush(events, (now, next(numbers), chosen, []))

    for client in range(clients):
        send(client, 0.0)
    now, ended, sent = 0.0, 0, clients
    while ended < total:
        now, _, i, replied = heapq.heappop(events)
        loads[i] -= len(replied)
        ended += len(replied)
        for client in replied:
            if sent < total:
                sent += 1
                send(client, now)
        if engines[i].waiting or engines[i].running:
            seconds, replied = engines[i].step()
            heapq.heappush(events, (now + seconds, next(numbers), i, replied))
        else:
            idle.add(i)
    return total / now, sum(engine.found for engine in engines)


def compare(name: str, num_engines: int, clients: int) -> list[dict[str, Any]]:
    """Return a record for each rule under one load."""
    load = LOADS[name]
    total = max(2000, 6 * clients)
    alone, _ = simulate(load, RULES["load"], 1, clients // num_engines, total // num_engines)
    best = (total - load.prefixes) * (load.shared // BLOCK * BLOCK)
    rows = []
    for rule, bounds in RULES.items():
        rate, found = simulate(load, bounds, num_engines, clients, total)
        row = {"load": name, "engines": num_engines, "clients": clients, "rule": rule}
        row |= {
            "times_one_engine": round(rate / alone, 2),
            "share_of_hits": round(found / best, 3) if best else None,
        }
        rows.append(row)
    return rows


def main() -> None:
    """Simulate and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256, 1024])
    add_bookkeeping(parser)
    options = parser.parse_args()
    rows = [
        row
        for name in LOADS
        for engines in options.engines
        for clients in options.clients
        for row in compare(name, engines, clients)
    ]
    write_report("routing", rows, (), folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()
