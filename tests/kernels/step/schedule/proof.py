"""Proves that the programs of a recorded launch cannot deadlock, and that each load finds the number meant for it.

`check` holds for every order in which the programs run. All of them must be resident, and the ring of each program must
have passed its checks, which is so if the launch could be recorded.

**No deadlock.** Counters only grow, and a place that is published is not cleared before its loads are done (below). So
what a program can do next, it can do whatever the others do before, and if the programs end in one order, they end in
each. `_Run` runs them in one.

**Who has arrived.** A wait for k arrivals at a counter shows which k programs have arrived only if no other arrival can
take their place. Therefore all programs run as far as they can without passing a wait for k or more at this counter;
exactly k must have arrived then. In any order nothing else has happened when the first of these waits is passed.

**What is before an event.** For each program there are two positions, up to which its events are

- *done*: whatever happens now, they have happened. Stores and clears must be behind the loads of what they replace.
- *seen*: their stores are seen by loads from now on. Loads must be behind the store or the clear that they rely on.

What the two relations assume of the GPU, and which line of the kernel it is about:

1. Events before a barrier of the consumers are done and seen by all of their threads behind it: `gl.thread_barrier` in
   `count_in` and behind the loop of `wait_grid`.
2. After a wait, what the k programs had done before the barrier before their arrival is done: `count_in`. A load is
   done when its value has decided a branch (`received`), or has gone to shared memory before that barrier: with EARLY
   every published number passes `received`, and without it arrivals are releases, which need not assume this.
3. What they had seen and stored is seen if `red.release` added the arrival (`arrive_grid`, and without EARLY
   `arrive_published`) and `ld.acquire` saw it (`wait_grid`). The additions to a counter are one chain of atomic
   read-modify-writes, so the load synchronizes with all that it counts.
4. `red.relaxed` (`arrive_published` with EARLY) releases what was seen and stored before the barrier before the last
   `fence.acq_rel` of the same thread: thread 32 in `wait_grid` with FENCE and in `count_in`.
5. The first load of a published number (`gl.load` with `.cg`) is weak and may race with its store; it returns the
   number or what was there before, because aligned stores of 16 and 32 bits are not torn. The store (`store_relaxed`)
   and the repeated loads (`received`) are relaxed, so these end.
6. A launch is behind the one before it: `BoundStep`, one stream.

**What is proved of numbers**, for each half of a vector in each layer:

- Each place that is loaded has been stored in this layer and half, by one program and once. Each that is stored is
  loaded.
- With EARLY, a load has seen the clear of its place in the layer before, so it finds nothing or the layer's number; in
  layer 0 it finds the half that the step before has left empty. Without EARLY, it has seen the store.
- When a place is stored or cleared, all loads of earlier layers from its half are done, and so are the program's
  stores and clears there.
- With EARLY, each layer clears the whole other half, each place by the program that stores it in the next layer.

**From step to step.** A step begins with counters that are 0 and, with EARLY, with one half that is empty. It ends so:
program 0 stores 0 to all counters that were used, when all uses are done, and the half that the last layer has cleared
as that with which the next step begins, whatever the positions of either step are. A refused launch runs no program.
Steps of another number of rows have other buffers and counters (`BoundStep`).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Final

import numpy as np

from kernels.step.gpu.grid_barrier import PARITY
from tests.kernels.step.schedule.events import (
    EXCHANGED,
    PARTIALS,
    Access,
    Arrive,
    Barrier,
    Fence,
    Record,
    Wait,
    require,
)

_NEVER: Final = -1
_SAMPLED: Final = -1
"""Takes the place of a counter for the tokens that the step before has sampled."""


def check(record: Record) -> None:
    """Prove a launch correct, as this module describes.

    Raises:
        ScheduleError: what could go wrong, or is not proved.
    """
    exchange = _Exchange(record)
    exchange.check_places()
    _check_outputs(record)
    _check_cache(record)
    _check_attended(record)
    _Run(record, exchange).run()


class _Exchange:
    """Which places programs store, clear and load, by half and layer, and at which positions of their events.

    Buffers without halves have half 0.
    """

    def __init__(self, record: Record) -> None:
        self.record, self.early = record, bool(record.c.EARLY)
        self.num_programs = len(record.programs)
        self._accesses = collections.defaultdict(list)
        """By kind, buffer, half and layer, (program, set of places)."""
        self._last: dict[tuple[str, str, int, int], np.ndarray] = {}
        self._storing: dict[tuple[str, int, int], np.ndarray] = {}
        """By buffer, half and layer, the program that stores each place, `_NEVER` if none."""
        self._halves: dict[tuple[str, int], int] = {}
        self._sources: dict[tuple[int, int], np.ndarray] = {}
        for program, events in enumerate(record.programs):
            for position, event in enumerate(events):
                if isinstance(event, Access) and event.buffer in (*EXCHANGED, *PARTIALS):
                    self._add(program, position, event)

    def _add(self, program: int, position: int, event: Access) -> None:
        key = event.kind, event.buffer, self.half_of(event), event.layer
        self._accesses[key].append((program, event.places))
        if key not in self._last:
            self._last[key] = np.full(self.num_programs, _NEVER)
        self._last[key][program] = position

    def _size(self, buffer: str) -> int:
        """Return the elements of a half."""
        size = self.record.sizes[buffer]
        return size // 2 if buffer in EXCHANGED else size

    def half_of(self, event: Access) -> int:
        """Return the half that an access is in."""
        key = event.buffer, event.places
        if key not in self._halves:
            places = self.record.places.sets[event.places]
            size = self._size(event.buffer)
            first, last = int(places.min()) // size, int(places.max()) // size
            require(first == last, event.buffer, "is accessed in both halves at once")
            self._halves[key] = first
        return self._halves[key]

    def _inside(self, number: int, buffer: str, half: int) -> np.ndarray:
        """Return a set of places as places of a half."""
        return self.record.places.sets[number] - half * self._size(buffer)

    def last(self, kind: str, buffer: str, half: int, layer: int) -> np.ndarray | None:
        """Return the position of each program's last access of a kind, `_NEVER` if it has none; None if no one has."""
        return self._last.get((kind, buffer, half, layer))

    def sources(self, event: Access, half: int) -> np.ndarray:
        """Return which programs store the places of a load, [programs] bool."""
        storing = self._storing[event.buffer, half, event.layer]
        key = event.places, id(storing)
        if key not in self._sources:
            found = np.zeros(self.num_programs, bool)
            found[storing[self._inside(event.places, event.buffer, half)]] = True
            self._sources[key] = found
        return self._sources[key]

    def check_places(self) -> None:
        """Check which places are stored, cleared and loaded, without the order of this."""
        known: dict[Any, np.ndarray] = {}
        for (kind, buffer, half, layer), found in self._accesses.items():
            if kind == "store":
                key = buffer, half, tuple(found)
                if key not in known:
                    known[key] = self._writers(kind, buffer, half, layer)
                self._storing[buffer, half, layer] = known[key]
        for kind, buffer, half, layer in self._accesses:
            if kind == "load":
                self._check_loads(buffer, half, layer)
            elif kind == "store":
                self._check_loaded(buffer, half, layer)
                both = buffer in EXCHANGED and ("store", buffer, 1 - half, layer) in self._accesses
                require(not both, buffer, "is stored in both halves in layer", layer)
                if self.early and buffer in EXCHANGED:
                    self._check_clears(buffer, half, layer)

    def _writers(self, kind: str, buffer: str, half: int, layer: int) -> np.ndarray:
        """Return which program stores or clears each place; require that no two do, and that none is stored twice."""
        owner = np.full(self._size(buffer), _NEVER)
        for program, number in self._accesses.get((kind, buffer, half, layer), ()):
            inside = self._inside(number, buffer, half)
            before = owner[inside]
            if kind == "store":
                twice = before != _NEVER
                require(len(np.unique(inside)) == len(inside), buffer, "is stored twice at once")
            else:
                twice = (before != _NEVER) & (before != program)
            require(
                not twice.any(), "place", inside[twice][:1], "of", buffer, "is written twice in layer", layer,
                "by programs", before[twice][:1], "and", program,
            )  # fmt: skip
            owner[inside] = program
        return owner

    def _check_loads(self, buffer: str, half: int, layer: int) -> None:
        storing = self._storing.get((buffer, half, layer))
        require(
            storing is not None, "half", half, "of", buffer, "is loaded in layer", layer, "which does not store it"
        )  # fmt: skip
        for number in {places for _, places in self._accesses["load", buffer, half, layer]}:
            inside = self._inside(number, buffer, half)
            missing = inside[storing[inside] == _NEVER]
            require(
                not len(missing), "place", missing[:1], "of", buffer, "is loaded in layer", layer, "but not stored"
            )  # fmt: skip

    def _check_loaded(self, buffer: str, half: int, layer: int) -> None:
        left = self._storing[buffer, half, layer] != _NEVER
        for number in {
            places for _, places in self._accesses.get(("load", buffer, half, layer), ())
        }:
            left[self._inside(number, buffer, half)] = False
        require(
            not left.any(), "place", np.argmax(left), "of", buffer, "is stored in layer", layer, "but not loaded"
        )  # fmt: skip

    def _check_clears(self, buffer: str, half: int, layer: int) -> None:
        owner = self._writers("clear", buffer, 1 - half, layer)
        left = int((owner == _NEVER).sum())
        require(not left, "layer", layer, "leaves", left, "places of the other half of", buffer)
        following = self._storing.get((buffer, 1 - half, layer + 1))
        if following is not None:
            stored = following != _NEVER
            require(
                (following[stored] == owner[stored]).all(),
                buffer, "is stored in layer", layer + 1, "by programs that have not cleared it",
            )  # fmt: skip


def _check_outputs(record: Record) -> None:
    """Require that each logit, token and log-probability is stored once."""
    for name in ("logits", "tokens", "logprobs"):
        count = np.zeros(record.sizes[name], np.int64)
        for events in record.programs:
            for event in events:
                if isinstance(event, Access) and event.buffer == name:
                    require(event.kind == "store", name, "is loaded")
                    np.add.at(count, record.places.sets[event.places], 1)
        require((count == 1).all(), name, "is stored", np.unique(count), "times")


def _check_cache(record: Record) -> None:
    """Require that each row's key and value are stored to its slot once in each layer, and nothing else."""
    c, slots = record.c, record.slots[record.slots >= 0]
    numbers = (slots[:, None] * (c.KV_HEADS * c.D) + np.arange(c.KV_HEADS * c.D)).ravel()
    blocks, offsets = np.divmod(slots, c.BLOCK_SIZE)
    lines = blocks[:, None] * c.KV_HEADS + np.arange(c.KV_HEADS)
    scales = (lines * c.BLOCK_SIZE + offsets[:, None]).ravel()
    expected = {"keys": numbers, "values": numbers}
    if c.FP8:
        expected |= {"key_scales": scales, "value_scales": scales}
    found = collections.defaultdict(list)
    for events in record.programs:
        for event in events:
            if isinstance(event, Access) and event.buffer in expected:
                found[event.buffer, event.layer].append(record.places.sets[event.places])
    for name, places in expected.items():
        for layer in range(c.LAYERS):
            stored = np.sort(np.concatenate(found.get((name, layer), [places[:0]])))
            require(
                np.array_equal(stored, np.sort(places)),
                name, "of layer", layer, "are stored at places", stored, "not", np.sort(places),
            )  # fmt: skip


def _check_attended(record: Record) -> None:
    """Require that each query head of a row attends every stage of keys that the row may see, once."""
    c = record.c
    heads = len(record.positions) * c.LAYERS * c.HEADS
    require(len(record.attended) == heads, len(record.attended), "of", heads, "heads attend")
    for (layer, row, head), spans in record.attended.items():
        window, position = record.windows[layer], int(record.positions[row])
        first = max(position - window + 1, 0) // c.KEYS if window else 0
        stages = sorted(it for begin, end in spans for it in range(begin, end))
        require(
            stages == list(range(first, position // c.KEYS + 1)),
            "head", head, "of row", row, "attends stages", stages, "in layer", layer,
        )  # fmt: skip


@dataclasses.dataclass
class _Program:
    """What is before the next event of a program.

    Attributes:
        done: of each program, the position up to which its events are done; likewise `seen`.
        waited: `done` and `seen` of waits since the last barrier.
        released: `seen` at the last fence, and the thread that executed it.
    """

    done: np.ndarray
    seen: np.ndarray
    waited: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    released: tuple[np.ndarray, int] | None = None


class _Run:
    """One order of the programs; what is before an event is so in every order."""

    def __init__(self, record: Record, exchange: _Exchange) -> None:
        self._record, self._exchange = record, exchange
        count = len(record.programs)

        def nowhere() -> np.ndarray:
            return np.zeros(count, np.int64)

        self._programs = [_Program(nowhere(), nowhere()) for _ in range(count)]
        self._next = nowhere()
        self._counters: collections.Counter[int] = collections.Counter()
        self._arrived = collections.defaultdict(lambda: (nowhere(), nowhere()))
        """By counter, what is done and seen after all arrivals so far."""
        self._passed: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        """By counter and number of arrivals, what is done and seen after a wait."""
        self._used = collections.defaultdict(lambda: np.full(count, _NEVER))
        """By counter, the position of each program's last use."""
        self._reset: dict[int, int | None] = {}

    def run(self) -> None:
        """Run all programs to their end."""
        active = list(range(len(self._programs)))
        while active:
            moved = True
            while moved:
                moved = sum(self._advance(number) for number in active) > 0
            active = [it for it in active if self._next[it] < len(self._record.programs[it])]
            if active:
                self._pass_one(active)
        self._check_end()

    def _event(self, number: int) -> Any:
        return self._record.programs[number][self._next[number]]

    def _pass_one(self, active: list[int]) -> None:
        """Let programs pass one of the waits that they have come to."""
        events = [self._event(number) for number in active]
        waits = sorted({(it.counter, it.arrivals) for it in events if isinstance(it, Wait)})
        ready = [it for it in waits if self._counters[it[0]] >= it[1]]
        require(ready, "deadlock:", *map(self._blocked, active[:2]))
        counter, arrivals = ready[0]
        later = [it for it in self._passed if it[0] == counter and it[1] >= arrivals]
        require(not later, "a wait for", arrivals, "at counter", counter, "after one for", later)
        most = self._most_arrivals(active, counter, arrivals)
        require(
            most == arrivals,
            "a wait for", arrivals, "at counter", counter, "does not show which: up to", most, "arrive",
        )  # fmt: skip
        done, seen = self._arrived[counter]
        self._passed[counter, arrivals] = done.copy(), seen.copy()

    def _blocked(self, number: int) -> str:
        event = self._event(number)
        if isinstance(event, Wait):
            return (
                f"program {number} waits for {event.arrivals} arrivals at counter {event.counter}, "
                f"{self._counters[event.counter]} come;"
            )
        return f"program {number} waits for {event.buffer} of layer {event.layer};"

    def _most_arrivals(self, active: list[int], counter: int, arrivals: int) -> int:
        """Return how many arrivals a counter gets if no program passes a wait for `arrivals` or more at it."""
        counters, position = self._counters.copy(), self._next.copy()

        def is_blocked(event: Any) -> bool:
            if not isinstance(event, Wait):
                return self._is_missing(event, position)
            held = event.counter == counter and event.arrivals >= arrivals
            return held or counters[event.counter] < event.arrivals

        moved = True
        while moved:
            moved = False
            for number in active:
                events = self._record.programs[number]
                while position[number] < len(events) and not is_blocked(events[position[number]]):
                    event = events[position[number]]
                    if isinstance(event, Arrive):
                        counters[event.counter] += 1
                    position[number] += 1
                    moved = True
        return counters[counter]

    def _is_missing(self, event: Any, position: np.ndarray) -> bool:
        """Return whether an event polls places that programs at these positions have not stored."""
        if not (isinstance(event, Access) and event.kind == "poll"):
            return False
        half = self._exchange.half_of(event)
        last = self._exchange.last("store", event.buffer, half, event.layer)
        return bool(((position <= last) & self._exchange.sources(event, half)).any())

    def _advance(self, number: int) -> bool:
        """Run a program until it waits; return whether it has done anything."""
        events, program = self._record.programs[number], self._programs[number]
        begin = self._next[number]
        while self._next[number] < len(events):
            event = self._event(number)
            if isinstance(event, Access):
                if self._is_missing(event, self._next):
                    break
                self._access(number, program, event)
            elif isinstance(event, Barrier):
                self._barrier(number, program)
            elif isinstance(event, Fence):
                program.released = program.seen.copy(), event.thread
            elif isinstance(event, Arrive):
                self._arrive(number, program, event)
            elif isinstance(event, Wait):
                if (event.counter, event.arrivals) not in self._passed:
                    break
                self._wait(number, program, event)
            self._next[number] += 1
        return bool(self._next[number] > begin)

    def _barrier(self, number: int, program: _Program) -> None:
        for done, seen in program.waited:
            np.maximum(program.done, done, out=program.done)
            np.maximum(program.seen, seen, out=program.seen)
        program.waited = []
        program.done[number] = program.seen[number] = self._next[number]

    def _arrive(self, number: int, program: _Program, event: Arrive) -> None:
        done, seen = self._arrived[event.counter]
        np.maximum(done, program.done, out=done)
        here = int(self._next[number])
        if program.done[number] == here - 1:
            # Nothing is between the barrier and the arrival, which is done too.
            done[number] = here + 1
        if event.order == "release":
            np.maximum(seen, program.seen, out=seen)
        elif program.released is not None and program.released[1] == event.thread:
            np.maximum(seen, program.released[0], out=seen)
        self._counters[event.counter] += 1
        self._use(event.counter, number)

    def _wait(self, number: int, program: _Program, event: Wait) -> None:
        done, seen = self._passed[event.counter, event.arrivals]
        program.waited.append((done, seen if event.order == "acquire" else np.zeros_like(seen)))
        self._use(event.counter, number)

    def _use(self, counter: int, number: int) -> None:
        require(counter not in self._reset, "counter", counter, "is used after its reset")
        self._used[counter][number] = self._next[number]

    def _access(self, number: int, program: _Program, event: Access) -> None:
        if event.buffer in (*EXCHANGED, *PARTIALS):
            half = self._exchange.half_of(event)
            if event.kind == "load":
                self._load(number, program, event, half)
            elif event.kind in ("store", "clear"):
                self._write(number, program, event, half)
        elif event.buffer in ("counters", "sampled"):
            places = [_SAMPLED]
            if event.buffer == "counters":
                places = self._record.places.sets[event.places].tolist()
            for place in places:
                if event.kind == "load":
                    self._use(place, number)
                else:
                    late = self._late(number, program, self._used[place])
                    require(
                        late is None, "counter", place, "is reset while program", late, "may use it"
                    )
                    self._reset[place] = event.value

    @staticmethod
    def _late(number: int, program: _Program, last: np.ndarray) -> int | None:
        """Return another program whose event at these positions may not be done; None if there is none."""
        late = (last != _NEVER) & (program.done <= last)
        late[number] = False
        return int(np.argmax(late)) if late.any() else None

    def _load(self, number: int, program: _Program, event: Access, half: int) -> None:
        """Require that a load sees the layer's number or, with EARLY, that its place has been empty before."""
        exchange, buffer, layer = self._exchange, event.buffer, event.layer
        kind, last = "stored", exchange.last("store", buffer, half, layer)
        if exchange.early and buffer in EXCHANGED:
            kind, last = "cleared", exchange.last("clear", buffer, half, layer - 1)
            if last is None:
                require(
                    layer == 0 and half == self._record.base,
                    "half", half, "of", buffer, "in layer", layer, "may hold numbers of earlier layers or steps",
                )  # fmt: skip
                return
        unseen = exchange.sources(event, half) & (program.seen <= last)
        require(
            not unseen.any(), "program", number, "may load", buffer, "of layer", layer, "before it is", kind,
            "by program", np.argmax(unseen),
        )  # fmt: skip

    def _write(self, number: int, program: _Program, event: Access, half: int) -> None:
        """Require that what accessed a half in the layers before is done."""
        exchange, buffer = self._exchange, event.buffer
        if exchange.early and event.kind == "store" and buffer in EXCHANGED:
            require(event.strong, buffer, "is stored weakly, but polled by other programs")
        for layer in range(max(event.layer - 2, 0), event.layer):
            for kind in ("load", "poll"):
                last = exchange.last(kind, buffer, half, layer)
                late = None if last is None else self._late(number, program, last)
                require(
                    late is None, "program", number, f"{event.kind}s", buffer, "in layer", event.layer,
                    "while program", late, "may load that of layer", layer,
                )  # fmt: skip
            for kind in ("store", "clear"):
                last = exchange.last(kind, buffer, half, layer)
                require(
                    last is None or last[number] < program.done[number],
                    buffer, "is written twice without a barrier, in layers", layer, "and", event.layer,
                )  # fmt: skip

    def _check_end(self) -> None:
        for counter in self._counters:
            require(self._reset.get(counter) == 0, "counter", counter, "is not 0 after the step")
        following = (self._record.base + self._record.c.LAYERS) & 1
        found = self._reset.pop(PARITY.value, None)
        require(found == following, "the next step begins with half", found, "not", following)
        self._reset.pop(_SAMPLED, None)
        others = {it: value for it, value in self._reset.items() if value != 0}
        require(not others, "counters are not 0 after the step:", others)
