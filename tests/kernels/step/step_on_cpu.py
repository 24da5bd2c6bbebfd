"""Runs the single-launch decode step on a CPU: its own functions, on PyTorch's tensors instead of Gluon's.

Consumers and producer of each program are roles, which wait for each other at the kernel's barriers. Views of shared
memory follow their layouts. Products are exact and their sums are in float32.
Shared memory begins as NaN, and a stage is NaN from the start of a copy until it arrives. Published numbers, and the
places that are cleared for them, are those of `kernels.step.gpu.grid_barrier`, whose assembly is written again here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from kernels.gpu import unpack
from kernels.step.gpu import (
    attend,
    consumer,
    consumer_rows,
    grid_barrier,
    kernel,
    kernel_rows,
    merge_splits,
    producer,
    products_of_rows,
    ring,
    score,
    score_rows,
    step_constants,
    tensor_products,
    vectors,
)
from kernels.step.packed_scales import packed_scales
from tests.kernels.gluon_on_cpu import (
    Array,
    MBarrier,
    MBarriers,
    Pointer,
    array,
    let_others_run,
    run_roles,
    start_copy,
    wait_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODULES = (
    attend, consumer, consumer_rows, grid_barrier, merge_splits, producer, products_of_rows, ring, score, score_rows,
    step_constants, tensor_products, unpack, vectors,
)  # fmt: skip


class Constant(int):
    """An integer constant."""

    @property
    def value(self) -> int:
        return int(self)


def constant(x: Any) -> Any:
    """Return a constant of Gluon as a value of Python."""
    x = getattr(x, "value", x)
    return Constant(x) if type(x) is int else x


@functools.cache
def places(shape: tuple[int, ...], layout: tuple[Any, ...]) -> torch.Tensor:
    """Return where the elements of a shape are in shared memory."""
    kind, *fields = layout
    if kind == "linear":
        (bases,) = fields
        coordinates = torch.zeros(1, len(shape), dtype=torch.int64)
        for basis in bases:
            coordinates = torch.cat([coordinates, coordinates ^ torch.tensor(basis)])
        strides = torch.tensor(
            [int(torch.tensor(shape[i + 1 :]).prod()) for i in range(len(shape))]
        )
        numbers = (coordinates * strides).sum(1)
        assert numbers.sort().values.equal(torch.arange(len(numbers))), "two elements at one place"
        assert len(numbers) == torch.tensor(shape).prod()
        return numbers.argsort().view(shape)
    vec, per_phase, max_phase = fields
    columns = torch.arange(shape[-1]).expand(shape)
    if max_phase > 1:
        rows = torch.arange(shape[-2])[:, None] // per_phase % max_phase
        columns = ((columns // vec) ^ rows) * vec + columns % vec
    lines = torch.arange(columns.numel() // shape[-1]).view(*shape[:-1], 1)
    return lines * shape[-1] + columns


class Shared:
    """A view of shared memory: bytes, and the dtype, the shape and the layout in which they are seen."""

    def __init__(
        self, memory: torch.Tensor, dtype: torch.dtype, shape: list[int], layout: Any
    ) -> None:
        self.memory, self.dtype, self.shape, self.layout = memory, dtype, shape, layout

    def index(self, i: int) -> Shared:
        inner = [int(n) for n in self.shape[1:]]
        size = int(torch.tensor(inner).prod()) * self.dtype.itemsize
        assert 0 <= int(i) < self.shape[0]
        return Shared(self.memory[int(i) * size :][:size], self.dtype, inner, self.layout)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        size = int(torch.tensor([int(n) for n in shape]).prod()) * dtype.itemsize
        assert size <= len(self.memory), "the view is larger than the memory"
        return Shared(self.memory[:size], dtype, shape, layout)

    def load(self, layout: Any) -> Array:
        del layout
        return array(self.memory.view(self.dtype)[self._places()])

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype is self.dtype
        assert list(value.shape) == list(self.shape)
        self.memory.view(self.dtype)[self._places()] = torch.Tensor(value)

    def _places(self) -> torch.Tensor:
        return places(tuple(int(n) for n in self.shape), self.layout)


class Device:
    """What the kernel uses of Gluon, for all programs of a launch; a thread has its own program and copies."""

    float32, int16, int32, int64 = torch.float32, torch.int16, torch.int32, torch.int64
    uint8, uint16 = torch.uint8, torch.uint16
    float8e4nv, float16, bfloat16 = torch.float8_e4m3fn, torch.float16, torch.bfloat16
    static_range = range

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self.own = threading.local()

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_, **__: None
        return lambda *given, **_: array(getattr(torch, name)(*given))

    def SwizzledSharedLayout(self, vec: int, per_phase: int, max_phase: int, order: Any) -> Any:  # noqa: N802 - Gluon's name
        assert list(order) == sorted(order, reverse=True)
        return "swizzled", int(vec), int(per_phase), int(max_phase)

    def SharedLinearLayout(self, bases: list[list[int]]) -> Any:  # noqa: N802 - Gluon's name
        return "linear", tuple(map(tuple, bases))

    def constexpr(self, x: Any) -> Any:
        return x

    def program_id(self, _axis: int) -> int:
        number: int = self.own.program
        return number

    def num_programs(self, _axis: int) -> int:
        return self.programs

    def thread_barrier(self) -> None:
        """All warps of a role are one thread here."""

    def unchanged(self, x: Any, *_: Any, **__: Any) -> Any:
        return x

    multiple_of = max_contiguous = max_constancy = convert_layout = unchanged

    def arange(self, start: int, stop: int, layout: Any = None) -> Array:
        del layout
        return array(torch.arange(start, stop, dtype=torch.int32))

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Array:
        del layout
        return array(torch.zeros([int(n) for n in shape], dtype=dtype))

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> Array:
        del layout
        return array(torch.full([int(n) for n in shape], value, dtype=dtype))

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if all(isinstance(it, int) for it in (condition, a, b)):
            return a if condition else b
        return array(torch.where(torch.as_tensor(condition), a, b))

    def maximum(self, a: Any, b: Any) -> Any:
        return self._either(torch.maximum, max, a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return self._either(torch.minimum, min, a, b)

    def _either(self, of_tensors: Any, of_numbers: Any, a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return of_numbers(a, b)
        like = a if isinstance(a, torch.Tensor) else b
        return array(of_tensors(*(torch.as_tensor(it, dtype=like.dtype) for it in (a, b))))

    def sum(self, x: Array, axis: int) -> Array:
        return array(x.sum(axis))

    def max(self, x: Array, axis: int) -> Array:
        return array(x.amax(axis))

    def zeros_like(self, x: Array) -> Array:
        return array(torch.zeros_like(x))

    def fma(self, a: Any, b: Any, c: Any) -> Array:
        return array(a * b + c)

    def broadcast(self, a: Array, b: Array) -> tuple[Array, Array]:
        first, second = torch.broadcast_tensors(a, b)
        return array(first), array(second)

    def expand_dims(self, x: Array, axis: int) -> Array:
        return array(torch.as_tensor(x).unsqueeze(axis))

    def split(self, x: Array) -> tuple[Array, Array]:
        first, second = x.unbind(-1)
        return array(first), array(second)

    def join(self, a: Array, b: Array) -> Array:
        return array(torch.stack([a, b], -1))

    def reshape(self, x: Array, shape: list[int]) -> Array:
        return array(x.reshape([int(n) for n in shape]))

    def gather(self, x: Array, index: Array, axis: int) -> Array:
        return array(x.gather(axis, index.long().expand(x.shape)))

    def load(
        self, pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = ""
    ) -> Array:
        del cache_modifier
        offset, shown = pointer.places(mask)
        found = pointer.memory.view(-1)[offset]
        return array(
            found if mask is None else found.where(shown, torch.tensor(other, dtype=found.dtype))
        )

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        offset, shown = pointer.places(mask)
        value = torch.as_tensor(value).to(pointer.memory.dtype)
        offset, shown, value = torch.broadcast_tensors(
            offset, shown, torch.Tensor.as_subclass(value, torch.Tensor)
        )
        pointer.memory.view(-1)[offset[shown]] = value[shown]

    def copy(self, target: Shared, source: Pointer, mask: Any = None) -> None:
        """Start a copy, which arrives with the thread's next arrival."""
        target.memory.fill_(255)
        self.own.copies.append((target, source, mask))

    def copies_arrive(self, full: MBarrier, increment_count: bool) -> None:
        assert not increment_count
        copies, self.own.copies = self.own.copies, []

        def end() -> None:
            for target, source, mask in copies:
                target.store(self.load(source, mask).expand([int(n) for n in target.shape]))
            full.arrive()

        start_copy(end, in_order=True)

    def mma(self, a: Array, b: Array, acc: Array) -> Array:
        assert a.dtype is b.dtype
        return array(acc + a.float() @ b.float())

    def publish(
        self,
        vector: Pointer,
        size: int,
        parity: Any,
        place: Any,
        values: Array,
        exists: Any,
        c: Any,
    ) -> None:
        bits = vector.memory.view(_bits(vector.memory.dtype))
        target = Pointer(bits, parity * size + place)
        if c.EARLY:
            offset, shown = target.places(exists)
            assert (bits[offset[shown]] == -1).all(), "a place is not empty"
        there = torch.Tensor(values.to(vector.memory.dtype)).view(bits.dtype)
        self.store(target, there.where(there != -1, torch.iinfo(bits.dtype).max), exists)
        if c.EARLY:
            self.clear(vector, size, parity, place, exists)

    def clear(self, vector: Pointer, size: int, parity: Any, place: Any, exists: Any) -> None:
        bits = vector.memory.view(_bits(vector.memory.dtype))
        self.store(Pointer(bits, (1 - parity) * size + place), array(-1), exists)

    def received(self, values: Array, pointers: Pointer, *rest: Any) -> Array:
        """Load again until all has arrived; what is masked is never missing."""
        *_, c = rest
        kind = _bits(values.dtype)
        missing = torch.Tensor(values).view(kind) == -1
        if not c.EARLY or not missing.any():
            return values
        again = pointers.places(missing)[0][missing]
        memory = pointers.memory.view(kind).view(-1)
        wait_until(lambda: bool((memory[again] != -1).all()))
        values[missing] = pointers.memory.view(-1)[again]
        return values

    def arrive(self, counter: Pointer, _c: Any = None) -> None:
        counter.memory[int(counter.offset)] += 1
        let_others_run()

    def wait_grid(self, counter: Pointer, arrivals: Any, _fence: bool) -> None:
        place, enough = int(counter.offset), int(arrivals)
        wait_until(lambda: counter.memory[place] >= enough)


def _bits(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


class StepOnCPU:
    """Takes the place of the kernels `whole_step` and `step_of_rows`.

    Args:
        weights: of the model.
        caches: as in `bind_step`, as are `scales`.
        scales: likewise.
    """

    def __init__(self, weights: Any, caches: tuple[Any, ...], scales: tuple[Any, ...]) -> None:
        self._rows = kernel.table_rows(weights, caches, scales, packed_scales(weights))

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        """Return a function that runs the programs of a grid."""

        def launch(*arguments: Any, **constants: Any) -> None:
            del constants["num_warps"], constants["launch_cooperative_grid"]
            _launch(grid[0], self._rows, list(arguments), constants)

        return launch


def _launch(
    programs: int, rows_of_table: list[Any], arguments: list[Any], constants: dict[str, Any]
) -> None:
    made = step_constants.StepConstants(**constants, OF_ROWS="BATCH" in constants)
    c = SimpleNamespace(**{name: constant(it) for name, it in vars(made).items()})
    given = [Pointer(it.view(-1)) if isinstance(it, torch.Tensor) else it for it in arguments]
    table, embedding, norm, head, ids, positions, *rest = given
    earlier = (rest.pop(0),) if c.OF_ROWS else ()
    slots, block_table, *rest = rest
    columns = (rest.pop(0),) if c.OF_ROWS else ()
    ropes, rest = rest[: 2 if c.OF_ROWS else 4], rest[2 if c.OF_ROWS else 4 :]
    count = 9 if c.OF_ROWS else 8
    buffers, (counter, logits, tokens, logprobs, sampled, *rest) = tuple(rest[:count]), rest[count:]
    *rows, eps, scale = rest
    consume, produce = (
        (consumer_rows.consume_rows, producer.produce_rows)
        if c.OF_ROWS
        else (consumer.consume, producer.produce)
    )
    rotations = ropes if c.OF_ROWS else (ropes,)
    device = Device(programs)
    dtype = embedding.memory.dtype

    def role(function: Any, program: int, *arguments: Any) -> Callable[[], None]:
        def run() -> None:
            device.own.program, device.own.copies = program, []
            function(*arguments)
            assert not device.own.copies, "copies arrive nowhere"

        return run

    def look_up(_table: Pointer, layer: Any, field: int, _dtype: Any) -> Pointer:
        found = rows_of_table[int(layer)][field]
        return Pointer(torch.empty(0) if found is None else found.view(-1))

    with _in_place_of_gluon(device, look_up):
        consume, produce = consume.fn, produce.fn
        roles = []
        for program in range(programs):
            own = _shared_memory(dtype, c)
            roles.append(
                role(
                    produce,
                    program,
                    own,
                    table,
                    head,
                    positions,
                    *earlier,
                    block_table,
                    *columns,
                    c,
                )
            )
            roles.append(
                role(
                    consume, program, own, table, embedding, norm, ids, positions, *earlier, slots, *rotations, buffers,
                    counter, logits, tokens, logprobs, sampled, *rows, eps, scale, c,
                )
            )  # fmt: skip
        run_roles(roles)


def _shared_memory(dtype: torch.dtype, c: Any) -> SimpleNamespace:
    """Allocate a program's shared memory as `make_ring` does."""

    def shared(kind: torch.dtype, *shape: int, swizzle: tuple[int, int, int] = (1, 1, 1)) -> Shared:
        size = int(torch.tensor(shape).prod()) * kind.itemsize
        memory = torch.full((size,), 255, dtype=torch.uint8)
        return Shared(memory, kind, list(shape), ("swizzled", *swizzle))

    columns, rows = step_constants.COLUMNS.value, step_constants.ROWS.value
    if c.OF_ROWS:
        sums = shared(
            torch.float32,
            step_constants.MOST_TILES.value,
            rows,
            step_constants.SUMS.value,
            swizzle=(8, 1, 8),
        )
    else:
        tiles, each = step_constants.MOST_TENSOR_TILES.value, step_constants.WARP_SUMS.value
        sums = shared(torch.float32, tiles, rows, each, swizzle=(4, 1, 8))
    if c.HEADS_IN_SUMS:
        heads = sums._reinterpret(dtype, [c.HEAD_ROWS, c.DP], ("swizzled", 1, 1, 1))
    else:
        heads = shared(dtype, c.HEAD_ROWS, c.DP)
    return SimpleNamespace(
        data=shared(dtype, c.STAGES, step_constants.PARTS.value * rows * columns),
        x=shared(dtype, c.INPUTS // columns, columns),
        heads=heads,
        sums=sums,
        maxima=shared(torch.float32, c.HELD_P, c.LINES),
        totals=shared(torch.float32, c.HELD_P, c.LINES),
        scales=shared(torch.int32, c.STAGES, 2 * step_constants.PARTS.value * rows * c.PART_SCALES)
        if c.PART_SCALES
        else shared(torch.float32, c.STAGES, rows),
        full=MBarriers(c.STAGES, 1),
        empty=MBarriers(c.STAGES, 1),
    )


def unpacked(numbers: Array, dtype: torch.dtype) -> tuple[Array, Array]:
    """Convert as `kernels.gpu.unpack.unpack`: of four bytes, 0, 2, 1 and 3."""
    ordered = numbers.unflatten(-1, (-1, 2, 2)).transpose(-1, -2).flatten(-3)
    bias, unit = (128, 1) if dtype is torch.bfloat16 else (0, 2.0**-24)
    low, high = (((it + bias).float() * unit).to(dtype) for it in (ordered & 15, ordered >> 4))
    return array(low), array(high)


@contextlib.contextmanager
def _in_place_of_gluon(device: Device, look_up: Any) -> Iterator[None]:
    """Replace what the modules import, and let their functions call each other as Python's."""
    replaced = {
        "gl": device,
        "address": look_up,
        "mbarrier": SimpleNamespace(arrive=MBarrier.arrive, wait=MBarrier.wait),
        "async_copy": SimpleNamespace(
            async_copy_global_to_shared=device.copy,
            mbarrier_arrive=device.copies_arrive,
            commit_group=lambda: None,
            wait_group=lambda _: None,
        ),
        "mma_v2": device.mma,
        "widen": lambda numbers, dtype: numbers.to(dtype),
        "unpack": unpacked,
        "computed_again": lambda x: x,
        "publish": device.publish,
        "clear": device.clear,
        "received": device.received,
        "received_log": device.received,
        "arrive_published": device.arrive,
        "arrive_grid": device.arrive,
        "wait_grid": device.wait_grid,
    }
    with in_place(MODULES, replaced):
        yield


@contextlib.contextmanager
def in_place(
    modules: tuple[types.ModuleType, ...], replaced: dict[Any, Any], numbers: Any = None
) -> Iterator[None]:
    """Replace names that modules import, and let their functions call each other as Python's.

    Args:
        modules: of the kernel.
        replaced: by name, or by the function of a kernel in Python.
        numbers: takes the place of `range`.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            names: dict[str, Any] = {}
            for name, it in vars(module).items():
                if name in replaced:
                    names[name] = replaced[name]
                elif isinstance(getattr(it, "fn", None), types.FunctionType) and it.fn in replaced:
                    names[name] = replaced[it.fn]
                elif type(it).__name__ == "ConstexprFunction":
                    names[name] = _of_compiler(it.fn)
                elif hasattr(it, "fn"):
                    names[name] = it.fn
                elif type(it).__name__ == "constexpr":
                    names[name] = constant(it)
            stack.enter_context(mock.patch.multiple(module, **names))
            stack.enter_context(
                mock.patch.object(module, "range", numbers or _numbers, create=True)
            )
        yield


def _of_compiler(function: types.FunctionType) -> Callable[..., Any]:
    """Return a function that the compiler runs: its numbers are Python's, and equal arguments have one result."""

    @functools.cache
    def call(*arguments: Any) -> Any:
        names = {**function.__globals__, "range": range}
        own = types.FunctionType(function.__code__, names, argdefs=function.__defaults__)
        return own(*arguments)

    return call


def _numbers(*bounds: Any) -> Iterator[Array]:
    """Like `range`, of numbers that have the methods of Gluon's."""
    return (array(torch.tensor(i, dtype=torch.int32)) for i in range(*map(int, bounds)))


@contextlib.contextmanager
def steps_on_cpu(weights: Any, caches: tuple[Any, ...], scales: tuple[Any, ...]) -> Iterator[None]:
    """Run the launches of bound steps of a model on the CPU."""
    step = StepOnCPU(weights, caches, scales)
    with (
        mock.patch.object(kernel, "whole_step", step),
        mock.patch.object(kernel_rows, "step_of_rows", step),
    ):
        yield
