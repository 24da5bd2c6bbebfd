"""Records what the programs of a single launch do in memory that others see, by running the kernel without numbers.

`RecordedStep` runs the kernel itself, from `whole_step` or `step_of_rows` on, once for each program, alone. Addresses,
masks and loops are computed; floating-point numbers are not: a `Value` in their place knows from which uses of the ring
it was computed. The instructions of `grid_barrier` are read from their PTX, so that another order or thread changes the
record. `ARITHMETIC` lists the few functions that are not run.

Meanwhile the ring is checked, which only the two roles of a program share (`shared_memory`), and each tile and split
that is published is compared with what the producer has copied for it (`matched`).
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from triton.experimental.gluon import language as ttgl

from kernels.step.gpu import grid_barrier, kernel, kernel_rows, producer, step_constants
from kernels.step.packed_scales import packed_scales
from tests.kernels.gluon_on_cpu import constants_of
from tests.kernels.step.schedule.events import (
    EXCHANGED,
    PARTIALS,
    Access,
    Arrive,
    Barrier,
    Fence,
    Places,
    Record,
    Wait,
    require,
)
from tests.kernels.step.schedule.matched import Matcher
from tests.kernels.step.schedule.ptx import Instruction, instruction
from tests.kernels.step.schedule.shared_memory import (
    Copy,
    MBarriers,
    Ring,
    RowsOfWeights,
    Shared,
    StageMemory,
)
from tests.kernels.step.schedule.values import (
    Index,
    Int,
    Layers,
    Loaded,
    Memory,
    Pointer,
    Value,
    any_of,
    numbers,
)
from tests.kernels.step.step_on_cpu import MODULES, in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_INTEGERS: Final = (
    "ids", "positions", "earlier", "slots", "block_table", "sampled", "sampled_rows", "counters", "table",
)  # fmt: skip
_CONSTANTS: Final = ("embedding", "norm", "head", "cos", "sin", "local_cos", "local_sin")
_OUTPUTS: Final = ("logits", "tokens", "logprobs")
_SHARED: Final = frozenset((*EXCHANGED, *PARTIALS, *_OUTPUTS, "counters", "sampled"))
"""Arguments that programs store to, so that their loads are recorded."""
_DTYPES: Final = {
    torch.bfloat16: ttgl.bfloat16, torch.float16: ttgl.float16, torch.float32: ttgl.float32,
    torch.int64: ttgl.int64, torch.int32: ttgl.int32,
}  # fmt: skip
_DTYPE_NAMES: Final = (
    "float32", "int16", "int32", "int64", "uint8", "uint16", "float8e4nv", "float16", "bfloat16",
)  # fmt: skip
_BARRIER: Final = Barrier()


class Device:
    """What the kernel uses of Gluon, for one program of a launch."""

    static_range = range
    pointer_type = staticmethod(lambda dtype: dtype)

    def __init__(self, recorder: _Recorder, programs: int) -> None:
        self.recorder, self.programs, self.program = recorder, programs, 0
        for name in _DTYPE_NAMES:
            setattr(self, name, getattr(ttgl, name))

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_, **__: None
        return any_of

    def constexpr(self, x: Any) -> Any:
        return x

    def program_id(self, _axis: int) -> int:
        return self.program

    def num_programs(self, _axis: int) -> int:
        return self.programs

    def unchanged(self, x: Any, *_: Any, **__: Any) -> Any:
        return x

    multiple_of = max_contiguous = max_constancy = convert_layout = unchanged

    def arange(self, start: int, stop: int, layout: Any = None) -> Index:
        del layout
        return numbers(int(start), int(stop))

    def full_like(self, _x: Any, value: int) -> Int:
        return Int(value)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Value) or isinstance(b, Value) or isinstance(condition, Value):
            return any_of(condition, a, b)
        if any(isinstance(it, np.ndarray) for it in (condition, a, b)):
            return np.where(condition, a, b).view(Index)
        return a if condition else b

    def maximum(self, a: Any, b: Any) -> Any:
        return self._either(np.maximum, max, a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return self._either(np.minimum, min, a, b)

    def _either(self, of_arrays: Any, of_numbers: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Value) or isinstance(b, Value):
            return any_of(a, b)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            return of_arrays(a, b).view(Index)
        return Int(of_numbers(a, b))

    def expand_dims(self, x: Any, axis: int) -> Any:
        if isinstance(x, Value):
            return x
        if not isinstance(x, np.ndarray):
            x = np.array(x).view(Index)
        return x[(slice(None),) * axis + (None,)]

    def broadcast(self, a: Value, b: Value) -> tuple[Value, Value]:
        return a, b

    def split(self, x: Value) -> tuple[Value, Value]:
        return x, x

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        del layout
        return self.recorder.allocate(dtype, [int(it) for it in shape])

    def thread_barrier(self) -> None:
        self.recorder.barrier()

    def warp_specialize(self, roles: list[Any], warps: list[int], _registers: Any) -> None:
        self.recorder.run_roles(roles, 32 * warps[0])

    def load(
        self, pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = ""
    ) -> Any:
        return self.recorder.load(pointer, mask, other, cache_modifier)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        self.recorder.store(pointer, value, mask, strong=False)

    def inline_asm_elementwise(
        self, code: str, _constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        require(not is_pure, "an access to memory is declared pure")
        return self.recorder.execute(instruction(code), args, dtype, pack)


class _Recorder:
    """The events of one program, and what all programs of a launch share."""

    ring: Ring
    device: Device
    matcher: Matcher
    c: Any

    def __init__(
        self, record: Record, rows_of_table: list[Any], make_constants: Any, send_parts: Any
    ) -> None:
        self.record, self._table, self._make_constants = record, rows_of_table, make_constants
        self.layer = 0
        self.events: list[Any] = []
        self._allocated: list[Any] = []
        self._memories: dict[tuple[int, int], Memory] = {}
        self._polled: set[tuple[int, int]] = set()
        self._inside: set[tuple[str, int]] = set()
        self._parts: dict[Any, RowsOfWeights] = {}
        self._send_parts = send_parts

    def constants(self, *given: Any, **named: Any) -> Any:
        """Take the place of `StepConstants`."""
        if self.record.c is None:
            c = self._make_constants(*given, **named)
            c.LAYERS = Layers(c.LAYERS)
            self.record.c = self.c = c
            self.matcher = Matcher(self.record)
        self.ring = self.matcher.ring = Ring(self.c.STAGES)
        return self.c

    def run(self, function: Any, program: int, arguments: list[Any], constants: Any) -> None:
        """Record a program."""
        self.device.program, self.layer, self.events = program, 0, []
        self._allocated = []
        function(*arguments, **constants)
        self.record.programs.append(self.events)

    def run_roles(self, roles: list[Any], producer_threads: int) -> None:
        (consume, given), (produce, given_to_producer) = roles
        before = len(self.events)
        produce(*given_to_producer)
        require(len(self.events) == before, "the producer takes part in the exchange")
        self.ring.end_filling(producer_threads)
        self.layer = 0
        consume(*given)
        self.ring.end()
        self.matcher.end_program()

    def allocate(self, dtype: Any, shape: list[int]) -> Any:
        """Allocate shared memory; `make_ring` allocates the ring first and its barriers last, one row a stage each."""
        if dtype == ttgl.int64:
            found: Any = self.ring.empty if self.ring.full in self._allocated else self.ring.full
        elif shape[0] == self.c.STAGES and (
            not self._allocated or self._holds_scales(dtype, shape)
        ):
            found = StageMemory(self.ring, dtype, shape)
        else:
            found = Shared(dtype, shape)
        self._allocated.append(found)
        return found

    def _holds_scales(self, dtype: Any, shape: list[int]) -> bool:
        if self.c.PART_SCALES:
            return bool(dtype == ttgl.int32)
        return bool(self.c.FP8_WEIGHTS) and dtype == ttgl.float32 and shape == [self.c.STAGES, 8]

    def of_ring(self, name: str) -> Callable[..., None]:
        """Return a function that calls a method of the ring of the program that runs."""

        def call(*given: Any, **named: Any) -> None:
            getattr(self.ring, name)(*given, **named)

        return call

    def init(self, barrier: tuple[MBarriers, int], count: int) -> None:
        kind, stage = barrier
        kind.counts[stage] = int(count)

    def look_up(self, _table: Any, layer: int, field: int, dtype: Any) -> Pointer:
        """Take the place of `step_constants.address`."""
        key = int(layer), int(field)
        if key not in self._memories:
            tensor = self._table[key[0]][key[1]]
            size = tensor.numel() if isinstance(tensor, torch.Tensor) else 0
            name = step_constants.FIELDS[key[1]]
            if layer >= self.c.LAYERS:
                name += "'"
            self._memories[key] = Memory(name, dtype, size, key[0] % self.c.LAYERS)
        return Pointer(self._memories[key])

    def layers(self, *bounds: Any) -> Iterator[Int]:
        """Take the place of `range`."""
        counts = len(bounds) == 1 and isinstance(bounds[0], Layers)
        for i in range(*map(int, bounds)):
            if counts:
                self.layer = i
            yield Int(i)
        if counts:
            self.layer = int(bounds[0])

    def send_parts(
        self,
        ring: Any,
        stage: Any,
        weight: Pointer,
        number: Any,
        last: Any,
        inputs: int,
        *more: Any,
    ) -> None:
        """Take the place of `send_parts`, which runs once for all tiles that have the same columns of as many rows."""
        key = weight.memory.name, int(number), int(last), inputs, *map(int, more)
        if key not in self._parts:
            copies: list[Copy] = []
            collecting = SimpleNamespace(
                copy=lambda target, source, mask=None: copies.append(
                    Copy(target.path, source, mask)
                )
            )
            kept, self.ring = self.ring, collecting
            self._send_parts(ring, stage, Pointer(weight.memory), number, last, inputs, *more)
            self.ring = kept
            self._parts[key] = self.matcher.rows_of_weights(copies, inputs)
        require(not weight.terms and not weight.offset % inputs, "a tile begins within a row")
        self.ring.copy_weights(int(stage), weight.memory, weight.offset // inputs, self._parts[key])

    def barrier(self) -> None:
        self.ring.barriers += 1
        if not (self.events and isinstance(self.events[-1], Barrier)):
            self.events.append(_BARRIER)

    def load(self, pointer: Pointer, mask: Any, other: Any, cache_modifier: str) -> Any:
        memory = pointer.memory
        found: Any = None
        if memory.integers is not None:
            found = self._integers(pointer, mask, other)
        if memory.name not in _SHARED:
            return Value(dtype=memory.dtype.element_ty) if found is None else found
        require(not self.is_producer, f"the producer loads {memory.name}")
        event = self._access("load", pointer, mask, strong=False)
        if memory.integers is not None:
            return found
        require(
            cache_modifier == ".cg",
            f"{memory.name} is loaded through the first-level cache in layer {self.layer}",
        )
        if self.c.EARLY and memory.name in EXCHANGED:
            return Loaded(event, mask, memory.dtype.element_ty)
        return Value(dtype=memory.dtype.element_ty)

    def _integers(self, pointer: Pointer, mask: Any, other: Any) -> Any:
        integers = pointer.memory.integers
        if not pointer.terms:
            return Int(integers[pointer.offset] if mask is None or mask else other)
        place = np.asarray(sum(pointer.terms, start=np.int64(pointer.offset)))
        place, shown = np.broadcast_arrays(place, np.asarray(True if mask is None else mask, bool))
        found = np.where(shown, integers[np.where(shown, place, 0)], other)
        return found.view(Index)

    @property
    def is_producer(self) -> bool:
        return not self.ring.consuming

    def store(self, pointer: Pointer, value: Any, mask: Any, strong: bool) -> None:
        name = pointer.memory.name
        cleared = isinstance(value, Int) and value == -1 and name in EXCHANGED
        kind = "clear" if cleared else "store"
        event = self._access(kind, pointer, mask, strong=strong, value=value)
        if kind == "store" and isinstance(value, Value):
            self.matcher.stored(event, value.uses)

    def _access(
        self, kind: str, pointer: Pointer, mask: Any, strong: bool, value: Any = None
    ) -> Access:
        places = pointer.places(mask)
        memory = pointer.memory
        number = self.record.places.number(places)
        if (memory.name, number) not in self._inside:
            self._inside.add((memory.name, number))
            require(
                not len(places) or (places.min() >= 0 and places.max() < memory.size),
                memory.name,
                [memory.size],
                "has no place",
                places.max(initial=0),
            )
        name = memory.name
        event = Access(
            kind, name, number, self.layer, strong, int(value) if isinstance(value, int) else None
        )
        if len(places):
            self.events.append(event)
        return event

    def execute(self, it: Instruction, args: list[Any], dtype: Any, pack: int) -> Any:
        """Execute the PTX of `grid_barrier`."""
        if it.kind in ("arrive", "wait"):
            pointer = args[0]
            require(pointer.memory.name == "counters" and not pointer.terms, "no counter")
            require(0 <= pointer.offset < pointer.memory.size, f"no counter {pointer.offset}")
        if it.kind == "arrive":
            self.events.append(Arrive(pointer.offset, it.order, it.thread or 0))
            return None
        if it.kind == "wait":
            if it.fence is not None:
                self.events.append(Fence(it.fence))
            self.events.append(Wait(pointer.offset, int(args[1]), it.order, it.thread or 0))
            return None
        if it.kind == "store":
            pointer, value, exists = args
            shown = True if isinstance(exists, int) and exists else np.asarray(exists) != 0
            self.store(pointer, value, shown, strong=True)
            return None
        return self._poll(*args, dtype, pack)

    def _poll(self, loaded: Any, pointers: Pointer, dtype: Any, pack: int) -> Value:
        require(isinstance(loaded, Loaded), "numbers are received that are not published")
        event = self._access("poll", pointers, loaded.mask, strong=True)
        require(
            event.places == loaded.access.places and event.buffer == loaded.access.buffer,
            f"{event.buffer} is loaded again from other places",
        )
        key = event.places, pack
        if key not in self._polled:
            self._polled.add(key)
            self._check_pack(pointers, loaded.mask, pack)
        return Value(dtype=dtype)

    def _check_pack(self, pointers: Pointer, mask: Any, pack: int) -> None:
        """Require that numbers which are loaded again together are adjacent, and that all or none of them exist."""
        if pack == 1:
            return
        places = np.asarray(sum(pointers.terms, start=np.int64(pointers.offset)))
        places, shown = np.broadcast_arrays(places, np.asarray(True if mask is None else mask))
        shown = shown.reshape(-1, pack)
        require((shown == shown[:, :1]).all(), "a part of what is loaded again does not exist")
        steps = np.diff(places.reshape(-1, pack), axis=1)
        require((steps[shown[:, 0]] == 1).all(), "what is loaded again is not adjacent")


def _nothing(*given: Any) -> Value:
    """Take the place of arithmetic."""
    for it in given:
        exchanged = isinstance(it, Pointer) and it.memory.name in _SHARED
        require(not exchanged, "published numbers are loaded where this is not recorded")
    return Value()


ARITHMETIC: Final = (
    "exponentials", "ranking_keys", "part_of_rows", "hadamard_transform", "norm_rows", "normed", "load_gains",
    "row_gains", "load_post_gains", "load_head_vector", "row_rotation", "store_vector", "widen", "unpack",
)  # fmt: skip
"""Functions of the kernel that are not run, since neither the ring nor other programs see what they do."""


def _vector_stored(ring: Any, _number: Any, values: Value, _fp8: Any, _c: Any) -> None:
    ring.x.store(values)


def _ring_of(*fields: Any) -> SimpleNamespace:
    """Take the place of the aggregate `Ring`."""
    names = ("data", "full", "empty", "x", "heads", "maxima", "totals", "sums", "scales")
    return SimpleNamespace(**dict(zip(names, fields, strict=True)))


class RecordedStep:
    """Takes the place of the kernels `whole_step` and `step_of_rows`; a launch makes `record`.

    Args:
        weights: of the model, as are `caches` and `scales`.
        base: the half that the step begins with.
        sequences: [B], the sequence of each row.
        columns: blocks of a sequence.
        replaced: functions of the kernel, and those in their place.
        only: programs that are run; all if None.
    """

    record: Record

    def __init__(
        self, function: Any, weights: Any, caches: Any, scales: Any, base: int, sequences: np.ndarray, columns: int,
        replaced: dict[Any, Any],
    ) -> None:  # fmt: skip
        self._function = function
        self._rows = kernel.table_rows(weights, caches, scales, packed_scales(weights))
        self._base, self._sequences, self._columns = base, sequences, columns
        self._windows = [layer.window or 0 for layer in weights.layers]
        self._replaced = replaced

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        """Return a function that records the programs of a grid."""
        return functools.partial(self._launch, grid[0])

    def _launch(self, programs: int, *arguments: Any, **constants: Any) -> None:
        require(constants.pop("launch_cooperative_grid"), "programs that need not run at once")
        warps = constants.pop("num_warps")
        require(warps == step_constants.CONSUMER_WARPS.value, f"{warps} warps consume")
        function = self._replaced.get(self._function.fn, self._function.fn)
        names = list(inspect.signature(function).parameters)
        memories = {}
        given: list[Any] = []
        for name, it in zip(names, arguments, strict=False):
            if isinstance(it, torch.Tensor):
                memories[name] = self._memory(name, it)
                given.append(Pointer(memories[name]))
            else:
                given.append(Int(it) if isinstance(it, int) else it)
        integers = {name: it.integers for name, it in memories.items() if it.integers is not None}
        record = Record(
            None, self._base, [], Places(), {name: it.size for name, it in memories.items()}, {},
            integers["positions"], integers["slots"], self._sequences, self._windows,
            self._columns,
        )  # fmt: skip
        make = constants_of(step_constants.StepConstants, (step_constants,))
        send_parts = self._replaced.get(producer.send_parts.fn, producer.send_parts.fn)
        recorder = _Recorder(record, self._rows, make, send_parts)
        recorder.device = Device(recorder, programs)
        with in_place((*MODULES, kernel, kernel_rows), self._names(recorder), recorder.layers):
            for program in range(programs):
                recorder.run(function, program, given, constants)
        self.record = record

    def _memory(self, name: str, it: torch.Tensor) -> Memory:
        known = (*EXCHANGED, *PARTIALS, *_OUTPUTS, *_INTEGERS, *_CONSTANTS)
        require(name in known, f"an unknown argument {name}")
        integers = None
        if name == "counters":
            integers = np.zeros(it.numel(), np.int64)
            integers[grid_barrier.PARITY.value] = self._base
        elif name == "table":
            rows = [[f if isinstance(f, int) else 0 for f in row] for row in self._rows]
            integers = np.array(rows, np.int64).ravel()
        elif name in _INTEGERS:
            integers = it.numpy().astype(np.int64).ravel()
        return Memory(name, _DTYPES.get(it.dtype), it.numel(), integers=integers)

    def _names(self, recorder: _Recorder) -> dict[Any, Any]:
        return {
            "gl": recorder.device,
            "StepConstants": recorder.constants,
            "address": recorder.look_up,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=recorder.init,
                wait=recorder.of_ring("wait"),
                arrive=recorder.of_ring("release"),
            ),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=recorder.of_ring("copy"),
                mbarrier_arrive=recorder.of_ring("copies_arrive"),
                commit_group=lambda: None,
                wait_group=lambda _: None,
            ),
            "mma_v2": any_of,
            **dict.fromkeys(ARITHMETIC, _nothing),
            "widen": lambda numbers, _dtype: numbers,
            "unpack": lambda numbers, _dtype: (numbers, numbers),
            "row_rotation": lambda *_: (Value(), Value()),
            "store_vector": _vector_stored,
            "computed_again": lambda x: x,
            "send_parts": recorder.send_parts,
            "Ring": _ring_of,
            **self._replaced,
        }
