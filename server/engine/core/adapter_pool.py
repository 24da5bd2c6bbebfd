"""The adapters that the engine holds: in host memory, in slots on the device, and the sequences that wait for one.

    files ── read, in a thread ──> host memory ── written between two steps ──> a slot

A sequence holds its slot from the moment it may run until it ends. Sequences whose adapter has no slot wait here, while
others run, in the order of priority and arrival.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, Final, Protocol

from model.errors import ModelError, without_paths
from server.engine.core.messages import MAX_LISTED_ADAPTERS
from server.engine.core.queue.length_counts import LengthCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from concurrent.futures import Future

    from server.engine.core.request import AdapterRef
    from server.engine.core.sequence import Sequence

log = logging.getLogger("tessera.engine")

_MOST_READS: Final = 2
"""Files that are read at a time."""
_MOST_WRITTEN: Final = 32 << 20
"""Bytes after which no further adapter is written between two steps while sequences run: 6 ms at 5 GB/s."""
_WAIT_SECONDS: Final = 0.002
"""How long `take` waits; messages of the front end wait as long."""


class AdapterLoader(Protocol):
    """Reads adapters and writes them to slots; implemented by `server.engine.runner.step.adapters`."""

    def read(self, adapter: AdapterRef) -> Future[Any]:
        """Start to read an adapter in another thread; the result is what `write` takes."""

    def write(self, slot: int, content: Any, /) -> None:  # noqa: ANN401 - the loader's own
        """Queue the copy of an adapter to a slot that no sequence holds."""

    def drop(self, content: Any, /) -> None:  # noqa: ANN401 - likewise
        """Forget an adapter that `write` gets no more."""

    def num_bytes(self, content: Any, /) -> int:  # noqa: ANN401 - likewise
        """Return the bytes that `write` copies."""


class AdapterPool:
    """Owns the slots, the adapters in host memory and the waiting sequences.

    Waiting sequences are served by priority, then in the order in which they came. One gets a free slot, or that which
    no sequence holds and whose last sequence ended first. If all are held, a slot drains for each adapter in host
    memory: the one whose sequences have the lowest priority, then the one that the fewest hold. New sequences of its
    adapter wait like any others, so that an adapter in constant use keeps no other one out. A slot that was just
    written does not drain. Between two steps only so many adapters are written that running sequences wait little.

    Adapters are read for the first sequences that wait, as many as host memory has room for. For the very first one, an
    adapter that has a slot may leave host memory; it is read again if it needs another slot.

    An adapter is identified by its digest: the same name with other weights is another one.

    Args:
        num_slots: on the device.
        capacity: adapters in host memory, those that are being read included; at least `num_slots`.
        loader: reads and writes them.

    Attributes:
        num_reads: adapters read from files.
        num_writes: adapters written to slots.
        num_evictions: adapters that lost their slot to another one.
        by_length: counts of the waiting sequences.
    """

    def __init__(self, num_slots: int, capacity: int, loader: AdapterLoader) -> None:
        assert 0 < num_slots <= capacity
        self.num_reads = self.num_writes = self.num_evictions = 0
        self.by_length = LengthCounts.zeros()
        self._capacity, self._loader = capacity, loader
        # By digest, those used longest ago first.
        self._contents: OrderedDict[str, Any] = OrderedDict()
        self._reading: dict[str, tuple[str, Future[Any]]] = {}  # path and content
        self._free = list(range(num_slots))[::-1]
        # Slots by digest, those whose last sequence ended first at the front.
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._holders: Counter[str] = Counter()
        self._held: dict[int, Sequence] = {}  # by request id
        # The priority for which each drains; the one chosen last at the end.
        self._draining: dict[str, int] = {}
        self._waiting: dict[int, Sequence] = {}  # by request id, in order of arrival
        self._wanted: Counter[str] = Counter()  # waiting sequences by digest
        self._chosen: set[str] = (
            set()
        )  # draining slots whose queued sequences were not returned yet
        self._returned: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> bool:
        """Give a sequence the slot of its adapter, or let it wait; returns whether it may run."""
        if self._is_open(_adapter(sequence).digest):
            self._hold(sequence)
            return True
        self._wait(sequence)
        return False

    def remove(self, request_id: int) -> bool:
        """Drop a waiting sequence; returns whether it was waiting."""
        sequence = self._waiting.get(request_id)
        if sequence is None:
            return False
        self._returned.discard(request_id)
        self._stop_waiting(sequence)
        while len(self._draining) > len(self._wanted):
            self._draining.popitem()
        return True

    def release(self, request_id: int) -> None:
        """Note that a sequence has ended; unknown ids are ignored."""
        self._returned.discard(request_id)
        self._let_go(request_id)

    def take(self, *, wait: bool) -> list[tuple[Sequence, str | None]]:
        """Remove the sequences that have a slot now, or whose adapter cannot be read.

        Args:
            wait: whether to wait for up to `_WAIT_SECONDS` for a file that is being read.

        Returns:
            Sequences with their `adapter_slot` set and None, or with the reason why they have none.
        """
        if wait and self._reading:
            futures = [future for _, future in self._reading.values()]
            concurrent.futures.wait(futures, _WAIT_SECONDS, concurrent.futures.FIRST_COMPLETED)
        failures = self._finish_reading()
        ended: list[tuple[Sequence, str | None]] = []
        groups: dict[str, list[Sequence]] = {}
        for sequence in sorted(self._waiting.values(), key=lambda it: it.priority):
            adapter = _adapter(sequence)
            if (failure := failures.get((adapter.digest, adapter.path))) is None:
                groups.setdefault(adapter.digest, []).append(sequence)
            else:
                self._stop_waiting(sequence)
                self._returned.discard(sequence.request_id)
                if not adapter.shows_paths:
                    failure = without_paths(failure, adapter.path)
                ended.append((sequence, f"the adapter cannot be loaded: {failure}"))
        placed: set[str] = set()
        idle = iter([it for it in self._slots if not self._holders[it]])
        written, most = 0, _MOST_WRITTEN if self._held else math.inf
        for digest, sequences in groups.items():
            if not (self._is_open(digest) or self._reopen(digest)):
                if digest in self._slots or digest not in self._contents:
                    continue
                if written >= most or not self._place(digest, idle):
                    continue
                placed.add(digest)
                written += self._loader.num_bytes(self._contents[digest])
            for sequence in sequences:
                self._stop_waiting(sequence)
                self._hold(sequence)
                ended.append((sequence, None))
        absent = {
            digest: sequences[0]
            for digest, sequences in groups.items()
            if digest in self._wanted and digest not in self._slots
        }
        num_open = len(self._free) + sum(not self._holders[it] for it in idle)
        self._drain(absent, placed, num_open)
        self._read(absent)
        return ended

    def return_queued(self, withdraw: Callable[[Sequence], bool]) -> None:
        """Let the sequences wait again that hold a slot that drains, and that no step has scheduled.

        A sequence returns at most once, so that it runs in the end; and only for one of its priority or a higher one.

        Args:
            withdraw: takes a sequence out of the queue; returns whether it was there.
        """
        chosen, self._chosen = self._chosen & self._draining.keys(), set()
        if not chosen:
            return
        for sequence in list(self._held.values()):
            digest = _adapter(sequence).digest
            if (
                digest not in chosen
                or sequence.first_scheduled_step is not None
                or sequence.priority < self._draining[digest]
                or sequence.request_id in self._returned
                or not withdraw(sequence)
            ):
                continue
            self._let_go(sequence.request_id)
            sequence.adapter_slot = -1
            self._returned.add(sequence.request_id)
            self._wait(sequence)

    @property
    def is_full(self) -> bool:
        """Whether sequences hold all slots."""
        return not self._free and len(self._holders) == len(self._slots)

    @property
    def running(self) -> list[str]:
        """Names of adapters of sequences that may run, each once and at most `MAX_LISTED_ADAPTERS`."""
        return sorted({_adapter(it).name for it in self._held.values()})[:MAX_LISTED_ADAPTERS]

    @property
    def waiting(self) -> list[str]:
        """Names of adapters of sequences that wait, likewise."""
        return sorted({_adapter(it).name for it in self._waiting.values()})[:MAX_LISTED_ADAPTERS]

    def idle_violations(self) -> list[str]:
        """Return what contradicts the bookkeeping of a pool without sequences."""
        counts = {
            "sequences with a slot": len(self._held),
            "holders of slots": self._holders.total(),
            "sequences that wait for a slot": len(self._waiting),
            "draining slots": len(self._draining),
            "sequences that returned": len(self._returned),
        }
        return [f"{count} {name}, expected none" for name, count in counts.items() if count]

    def check_invariants(self) -> None:
        """Assert the invariants. Slow: for tests."""
        used = [*self._slots.values(), *self._free]
        assert len(used) == len(set(used)), "a slot has two adapters"
        assert self._holders == Counter(_adapter(it).digest for it in self._held.values())
        assert self._wanted == Counter(_adapter(it).digest for it in self._waiting.values())
        assert self._holders.keys() <= self._slots.keys(), "a held adapter has no slot"
        assert self._draining.keys() <= self._slots.keys()
        assert len(self._draining) <= len(self._wanted)
        assert not self._held.keys() & self._waiting.keys()
        assert self._returned <= self._held.keys() | self._waiting.keys()
        assert not self._contents.keys() & self._reading.keys()
        assert len(self._contents) + len(self._reading) <= self._capacity
        assert len(self._reading) <= _MOST_READS
        assert self.by_length == LengthCounts.of(self._waiting.values())

    def _wait(self, sequence: Sequence) -> None:
        self._waiting[sequence.request_id] = sequence
        self._wanted[_adapter(sequence).digest] += 1
        self.by_length.add(sequence)

    def _stop_waiting(self, sequence: Sequence) -> None:
        del self._waiting[sequence.request_id]
        self.by_length.add(sequence, -1)
        digest = _adapter(sequence).digest
        self._wanted[digest] -= 1
        if not self._wanted[digest]:
            del self._wanted[digest]

    def _hold(self, sequence: Sequence) -> None:
        digest = _adapter(sequence).digest
        sequence.adapter_slot = self._slots[digest]
        self._held[sequence.request_id] = sequence
        self._holders[digest] += 1
        if digest in self._contents:
            self._contents.move_to_end(digest)

    def _let_go(self, request_id: int) -> None:
        sequence = self._held.pop(request_id, None)
        if sequence is None:
            return
        digest = _adapter(sequence).digest
        self._holders[digest] -= 1
        if not self._holders[digest]:
            del self._holders[digest]
            self._slots.move_to_end(digest)

    def _finish_reading(self) -> dict[tuple[str, str], str]:
        """Keep what was read; return why others could not be, by digest and path."""
        failures: dict[tuple[str, str], str] = {}
        for digest, (path, future) in list(self._reading.items()):
            if not future.done():
                continue
            del self._reading[digest]
            error = future.exception()
            if error is None:
                self._contents[digest] = future.result()
            elif isinstance(error, ModelError):
                failures[digest, path] = str(error)
                log.error("an adapter cannot be loaded: %s", error)
            else:
                failures[digest, path] = "an internal error"
                log.error("reading an adapter failed", exc_info=error)
        return failures

    def _is_open(self, digest: str) -> bool:
        """Whether an adapter has a slot that new sequences may hold."""
        return digest in self._slots and digest not in self._draining

    def _reopen(self, digest: str) -> bool:
        """Let an adapter keep its slot, which has drained; returns whether it has."""
        if digest not in self._draining or self._holders[digest]:
            return False
        del self._draining[digest]
        return True

    def _place(self, digest: str, idle: Iterator[str]) -> bool:
        """Write an adapter to a slot; returns whether there is one.

        Args:
            digest: of an adapter in host memory.
            idle: adapters whose slot no sequence held at the beginning.
        """
        if self._free:
            slot = self._free.pop()
        else:
            victim = next((it for it in idle if not self._holders[it]), None)
            if victim is None:
                return False
            slot = self._slots.pop(victim)
            self._draining.pop(victim, None)
            self.num_evictions += 1
        self._loader.write(slot, self._contents[digest])
        self.num_writes += 1
        self._slots[digest] = slot
        return True

    def _drain(
        self, absent: Mapping[str, Sequence], placed: AbstractSet[str], num_open: int
    ) -> None:
        """Let a slot drain for each adapter that was read and has none; let no more drain than adapters have none.

        Args:
            absent: the first waiting sequence of each adapter without a slot, by digest, in the order of service.
            placed: adapters that have just got their slots.
            num_open: slots that nothing holds, which the first of `absent` will get.
        """
        while len(self._draining) > len(absent):
            self._draining.popitem()
        ready = [it.priority for digest, it in absent.items() if digest in self._contents]
        num_missing = len(ready) - num_open - len(self._draining)
        if num_missing <= 0 or len(self._draining) + len(placed) >= len(self._slots):
            return
        best: dict[str, int] = {}
        for sequence in self._held.values():
            digest = _adapter(sequence).digest
            best[digest] = min(best.get(digest, sequence.priority), sequence.priority)
        kept = [it for it in self._holders if it not in self._draining and it not in placed]
        chosen = sorted(kept, key=lambda it: (-best[it], self._holders[it]))[:num_missing]
        for digest, priority in zip(chosen, ready[len(self._draining) :], strict=False):
            self._draining[digest] = priority
            self._chosen.add(digest)

    def _read(self, absent: Mapping[str, Sequence]) -> None:
        """Start to read adapters, as long as host memory has room for them; see `_drain`."""
        ranks = {digest: rank for rank, digest in enumerate(absent)}
        for digest, sequence in absent.items():
            if len(self._reading) >= _MOST_READS:
                return
            if digest in self._contents or digest in self._reading:
                continue
            if not self._make_room(digest, ranks):
                return  # there is none for later ones either
            adapter = _adapter(sequence)
            self._reading[digest] = adapter.path, self._loader.read(adapter)
            self.num_reads += 1

    def _make_room(self, digest: str, ranks: Mapping[str, int]) -> bool:
        """Make room in host memory for an adapter; returns whether there is.

        Adapters that are neither in a slot nor wanted leave first, those used longest ago before others; then, for the
        first that waits, those in slots; then those that wait behind it, the last one first.
        """
        if len(self._contents) + len(self._reading) < self._capacity:
            return True
        held = (it for it in self._contents if it not in ranks and it not in self._slots)
        victim = next(held, None)
        if victim is None and not ranks[digest]:
            victim = next((it for it in self._contents if it in self._slots), None)
        if victim is None:
            behind = (it for it in self._contents if ranks.get(it, -1) > ranks[digest])
            victim = max(behind, key=ranks.__getitem__, default=None)
        if victim is None:
            return False
        self._loader.drop(self._contents.pop(victim))
        return True


def _adapter(sequence: Sequence) -> AdapterRef:
    assert sequence.adapter is not None
    return sequence.adapter
