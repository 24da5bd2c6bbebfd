"""The adapters that the engine holds: in host memory, in slots on the device, and the sequences that wait for one.

    files ── read, in a thread ──> host memory ── written between two steps ──> a slot

A sequence holds its slot from the moment it may run until it ends. Sequences whose adapter has no slot wait here, while
others run, in the order of priority and arrival.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final, Protocol

from model.errors import ModelError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from server.engine.core.request import AdapterRef
    from server.engine.core.sequence import Sequence

log = logging.getLogger("tessera.engine")

_MOST_READS: Final = 2
"""Files that are read at a time."""
_WAIT_SECONDS: Final = 0.002
"""How long `take` waits; messages of the front end wait as long."""
_LISTED: Final = 32
"""Names in the statistics."""


class AdapterLoader(Protocol):
    """Reads adapters and writes them to slots; implemented by `server.engine.runner.step.adapters`."""

    def read(self, adapter: AdapterRef) -> Future[Any]:
        """Start to read an adapter in another thread; the result is what `write` takes."""

    def write(self, slot: int, content: Any, /) -> None:  # noqa: ANN401 - the loader's own
        """Queue the copy of an adapter to a slot that no sequence holds."""


class AdapterPool:
    """Owns the slots, the adapters in host memory and the waiting sequences.

    A waiting sequence gets a free slot, or that which no sequence holds and whose last sequence ended first. If all are
    held, the one that the fewest sequences hold drains: new sequences of its adapter wait like any others, so that an
    adapter in constant use keeps no other one out. There are never more draining slots than adapters that wait.

    An adapter is identified by its digest: the same name with other weights is another one.

    Args:
        num_slots: on the device.
        capacity: adapters that are kept in host memory, those in slots included; at least `num_slots`.
        loader: reads and writes them.

    Attributes:
        num_reads: adapters read from files.
        num_writes: adapters written to slots.
        num_evictions: adapters that lost their slot to another one.
    """

    def __init__(self, num_slots: int, capacity: int, loader: AdapterLoader) -> None:
        assert 0 < num_slots <= capacity
        self.num_reads = self.num_writes = self.num_evictions = 0
        self._capacity, self._loader = capacity, loader
        # By digest, those used longest ago first.
        self._contents: OrderedDict[str, Any] = OrderedDict()
        self._reading: dict[str, Future[Any]] = {}
        self._free = list(range(num_slots))[::-1]
        # Slots by digest, those whose last sequence ended first at the front.
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._holders: Counter[str] = Counter()
        self._held: dict[int, AdapterRef] = {}  # by request id
        self._draining: set[str] = set()
        self._waiting: dict[int, Sequence] = {}  # by request id, in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> bool:
        """Give a sequence the slot of its adapter, or let it wait; returns whether it may run."""
        adapter = _adapter(sequence)
        if self._is_open(adapter.digest):
            self._hold(sequence)
            return True
        self._waiting[sequence.request_id] = sequence
        return False

    def remove(self, request_id: int) -> bool:
        """Drop a waiting sequence; returns whether it was waiting."""
        if self._waiting.pop(request_id, None) is None:
            return False
        self._limit_draining()
        return True

    def release(self, request_id: int) -> None:
        """Note that a sequence has ended; unknown ids are ignored."""
        adapter = self._held.pop(request_id, None)
        if adapter is None:
            return
        self._holders[adapter.digest] -= 1
        if not self._holders[adapter.digest]:
            del self._holders[adapter.digest]
            self._slots.move_to_end(adapter.digest)

    def take(self, *, wait: bool) -> list[tuple[Sequence, str | None]]:
        """Remove the sequences that have a slot now, or whose adapter cannot be read.

        Args:
            wait: whether to wait for up to `_WAIT_SECONDS` for a file that is being read.

        Returns:
            Sequences with their `adapter_slot` set and None, or with the reason why they have none.
        """
        if wait and self._reading:
            concurrent.futures.wait(
                self._reading.values(), _WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED
            )
        failures = self._finish_reading()
        ended: list[tuple[Sequence, str | None]] = []
        groups: dict[str, list[Sequence]] = {}
        for sequence in sorted(self._waiting.values(), key=lambda it: it.priority):
            digest = _adapter(sequence).digest
            if (failure := failures.get(digest)) is None:
                groups.setdefault(digest, []).append(sequence)
            else:
                del self._waiting[sequence.request_id]
                ended.append((sequence, failure))
        for digest, sequences in groups.items():
            if self._is_open(digest) or self._place(digest, _adapter(sequences[0])):
                for sequence in sequences:
                    del self._waiting[sequence.request_id]
                    self._hold(sequence)
                    ended.append((sequence, None))
        self._limit_draining()
        self._limit_contents()
        return ended

    @property
    def running(self) -> list[str]:
        """Names of adapters of sequences that may run, each once and at most `_LISTED`."""
        return sorted({it.name for it in self._held.values()})[:_LISTED]

    @property
    def waiting(self) -> list[str]:
        """Names of adapters of sequences that wait, likewise."""
        return sorted({_adapter(it).name for it in self._waiting.values()})[:_LISTED]

    def idle_violations(self) -> list[str]:
        """Return what contradicts the bookkeeping of a pool without sequences."""
        counts = {
            "sequences with a slot": len(self._held),
            "holders of slots": self._holders.total(),
            "sequences that wait for a slot": len(self._waiting),
            "draining slots": len(self._draining),
        }
        return [f"{count} {name}, expected none" for name, count in counts.items() if count]

    def check_invariants(self) -> None:
        """Assert the invariants. Slow: for tests."""
        used = [*self._slots.values(), *self._free]
        assert len(used) == len(set(used)), "a slot has two adapters"
        assert self._holders == Counter(it.digest for it in self._held.values())
        assert self._holders.keys() <= self._slots.keys(), "a held adapter has no slot"
        assert self._draining <= self._slots.keys()
        assert len(self._draining) <= len({_adapter(it).digest for it in self._waiting.values()})
        needed = {_adapter(it).digest for it in self._waiting.values()} | self._slots.keys()
        assert len(self._contents) <= max(self._capacity, len(needed))

    def _hold(self, sequence: Sequence) -> None:
        adapter = _adapter(sequence)
        sequence.adapter_slot = self._slots[adapter.digest]
        self._held[sequence.request_id] = adapter
        self._holders[adapter.digest] += 1
        if adapter.digest in self._contents:
            self._contents.move_to_end(adapter.digest)

    def _finish_reading(self) -> dict[str, str]:
        """Keep what was read; return why others could not be, by digest."""
        failures: dict[str, str] = {}
        for digest, future in list(self._reading.items()):
            if not future.done():
                continue
            del self._reading[digest]
            error = future.exception()
            if error is None:
                self._contents[digest] = future.result()
            elif isinstance(error, ModelError):
                failures[digest] = f"the adapter cannot be loaded: {error}"
                log.error("an adapter cannot be loaded: %s", error)
            else:
                failures[digest] = "the adapter cannot be loaded: an internal error"
                log.error("reading an adapter failed", exc_info=error)
        return failures

    def _is_open(self, digest: str) -> bool:
        """Whether an adapter has a slot that new sequences may hold."""
        return digest in self._slots and digest not in self._draining

    def _place(self, digest: str, adapter: AdapterRef) -> bool:
        """Give an adapter a slot that sequences may hold; returns whether it has one now."""
        if digest in self._slots:  # it drains
            if self._holders[digest]:
                return False
            self._draining.discard(digest)
            return True
        if digest not in self._contents:
            if digest not in self._reading and len(self._reading) < _MOST_READS:
                self._reading[digest] = self._loader.read(adapter)
                self.num_reads += 1
            return False
        if self._free:
            slot = self._free.pop()
        else:
            victim = next((it for it in self._slots if not self._holders[it]), None)
            if victim is None:
                self._drain_another()
                return False
            slot = self._slots.pop(victim)
            self._draining.discard(victim)
            self.num_evictions += 1
        self._loader.write(slot, self._contents[digest])
        self.num_writes += 1
        self._slots[digest] = slot
        return True

    def _drain_another(self) -> None:
        """Let the slot that the fewest sequences hold drain, unless as many drain as adapters wait."""
        without = {_adapter(it).digest for it in self._waiting.values()} - self._slots.keys()
        if len(self._draining) < len(without):
            kept = (it for it in self._slots if it not in self._draining)
            if (chosen := min(kept, key=self._holders.__getitem__, default=None)) is not None:
                self._draining.add(chosen)

    def _limit_draining(self) -> None:
        """Let no more slots drain than adapters without a slot wait."""
        without = {_adapter(it).digest for it in self._waiting.values()} - self._slots.keys()
        while len(self._draining) > len(without):
            self._draining.pop()

    def _limit_contents(self) -> None:
        """Drop the adapters from host memory that were used longest ago, except those that are in use or wanted."""
        needed = {_adapter(it).digest for it in self._waiting.values()} | self._slots.keys()
        for digest in list(self._contents):
            if len(self._contents) <= self._capacity:
                return
            if digest not in needed:
                del self._contents[digest]


def _adapter(sequence: Sequence) -> AdapterRef:
    assert sequence.adapter is not None
    return sequence.adapter
