"""Runs the batch-invariant kernel of Hopper on a CPU: its own warp roles, on PyTorch's tensors instead of Gluon's.

The three roles of a thread block wait for each other at the kernel's barriers. Shared memory begins as NaN, and thread
blocks run one after the other in random order.
"""

from __future__ import annotations

import collections
import functools
import inspect
import random
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kernels.attention.hopper import (
    consumer,
    invariant,
    invariant_roles,
    part_results,
    ping_pong,
    pipeline,
    producer,
    scores,
)
from tests.kernels.attention.hopper_decode_on_cpu import DecodeDevice, argument
from tests.kernels.gluon_on_cpu import (
    Array,
    MBarrier,
    MBarriers,
    NamedBarrier,
    array,
    copy_box,
    in_place_of_gluon,
    run_roles,
    store_box,
    wait_products,
    wait_stores,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

KERNEL = invariant.invariant.fn
_NAMES = tuple(inspect.signature(KERNEL).parameters)
_MODULES = (
    consumer,
    invariant,
    invariant_roles,
    part_results,
    ping_pong,
    pipeline,
    producer,
    scores,
)
_FIRST_BARRIER = 9
_BUFFERS = (
    "q", "k", "v", "o", "items", "q_full", "q_empty", "k_full", "k_empty", "v_full", "v_empty", "item_full",
    "item_empty",
)  # fmt: skip


class Halves(Array):
    """A tensor whose `split` is Gluon's."""

    def split(self) -> tuple[Any, Any]:  # type: ignore[override]
        return self[..., 0], self[..., 1]


class Field:
    """One integer of a posted item."""

    def __init__(self) -> None:
        self.value = array(0)

    def store(self, value: Any) -> None:
        self.value = value.clone()

    def load(self, layout: Any) -> Any:
        del layout
        return self.value


class Items:
    """The ring of posted items."""

    def __init__(self, count: int) -> None:
        self.fields = [Field() for _ in range(count)]

    def index(self, i: Any) -> Field:
        return self.fields[int(i)]


class InvariantDevice(DecodeDevice):
    """What the roles use of Gluon."""

    def __init__(self, num_programs: int, consumers: int) -> None:
        super().__init__()
        self.programs = num_programs
        self.own = threading.local()
        self.products_of: collections.Counter[int] = collections.Counter()
        self.signals = [NamedBarrier() for _ in range(consumers)]

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype is self.int64:
            return MBarriers(shape[0])
        if dtype is self.int32:
            return Items(shape[0])
        return super().allocate_shared_memory(dtype, shape, layout)

    def num_programs(self, axis: int) -> int:
        assert axis == 0
        return self.programs

    def max(self, x: Any, axis: int) -> Any:
        return x if x.ndim == 0 else x.amax(axis)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Any:
        if list(shape) == [1]:
            return array(torch.zeros((), dtype=dtype))
        return super().zeros(shape, dtype, layout)

    def sum(self, x: Any, axis: int) -> Any:
        return array(torch.sum(x, axis))

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        return array(torch.where(array(condition), array(yes), array(no)))

    def exp2(self, x: Any) -> Any:
        """Compute in float64, because PyTorch's float32 result depends on the number of elements."""
        return array(torch.exp2(array(x).double()).float())

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        exact = array(x).double() * array(y).double() + array(z).double()
        return array(exact.float())

    def join(self, one: Any, other: Any) -> Any:
        return array(torch.stack((one, other), -1))

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        del layout, assert_trivial
        return value.as_subclass(Halves)

    def warpgroup_mma(self, *arguments: Any, **named: Any) -> Any:
        self.products_of[self.own.index] += 1
        return super().warpgroup_mma(*arguments, **named).as_subclass(Halves)

    def inline_asm_elementwise(self, code: str, *_: Any, **__: Any) -> Any:
        if "%ctaid.x" in code:
            return self.program[0]
        instruction, number, threads = code.partition(";")[0].split()
        assert threads == "256"
        signal = self.signals[int(number.rstrip(",")) - _FIRST_BARRIER]
        if instruction == "bar.arrive":
            signal.arrive()
        else:
            signal.wait()
        return None

    def copy_in(self, desc: Any, where: list[Any], full: MBarrier, target: Any) -> None:
        """Start to copy a box to shared memory."""
        copy_box(_box(desc, where), target, full)

    def copy_out(self, desc: Any, where: list[Any], source: Any) -> None:
        """Start to copy a box from shared memory; what lies outside of the tensor is not copied."""
        store_box(_box(desc, where), source)


def _box(desc: Any, where: list[Any]) -> torch.Tensor:
    starts = [int(it) for it in where]
    ends = map(sum, zip(starts, desc.box, strict=True))
    found: torch.Tensor = desc.memory[tuple(map(slice, starts, ends))]
    return found


class InvariantOnCPU:
    """Takes the place of the kernel `invariant`; `products` counts those of each consumer."""

    def __init__(self) -> None:
        self.products: collections.Counter[int] = collections.Counter()

    def __getitem__(self, grid: tuple[int]) -> Any:
        """Return a function that runs the programs of a grid."""
        programs = list(range(*grid))
        random.Random(0).shuffle(programs)

        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            given = dict(zip(_NAMES, map(argument, arguments), strict=False))
            c = _plain(constants)
            device = InvariantDevice(len(programs), c.CONSUMERS)
            with _in_place_of_gluon(device):
                for number in programs:
                    device.program = (number, 0, 0)
                    _run(device, given, c)
            self.products += device.products_of
            assert not any(it.arrived for it in device.signals), "arrivals are left"
            assert not given["counter"].memory.any()

        return launch


def _plain(constants: dict[str, Any]) -> SimpleNamespace:
    made = pipeline.Constants(
        *(constants[name] for name in _NAMES[_NAMES.index("HEADS") : _NAMES.index("PART")]),
        True, True, constants["WINDOW"], constants["SOFTCAP"], False, constants["OWN_OUTPUT"], 2,
        constants["PART"] // constants["BLOCK_N"], constants["ALTERNATE"],
    )  # fmt: skip
    return SimpleNamespace(**{name: it.value for name, it in vars(made).items()})


def _run(device: InvariantDevice, given: dict[str, Any], c: SimpleNamespace) -> None:
    pipe = pipeline.make_pipeline(given["q_desc"].dtype, given["o_desc"].dtype, c)
    results = tuple(
        given[name] for name in ("running", "partial_out", "partial_sums", "records", "arrivals")
    )
    supply = [
        given[name]
        for name in (
            "q_desc", "k_desc", "v_desc", "records", "block_table", "table_stride", "counter",
            "k_head_stride", "window",
        )
    ]  # fmt: skip
    scale = [given[name] for name in ("scale", "window", "softcap")]

    def consume(index: int) -> None:
        device.own.index = index
        invariant_roles.consume_parts(
            pipe, given["o_desc"], given["out"], results, *scale, index, c
        )

    run_roles(
        [
            lambda: invariant_roles.produce_parts(pipe, *supply, False, c),
            *(functools.partial(consume, index) for index in range(c.CONSUMERS)),
        ],
        seed=device.program[0],
    )


def _in_place_of_gluon(device: InvariantDevice) -> AbstractContextManager[None]:
    replaced = {
        "Pipeline": lambda *fields: SimpleNamespace(
            **dict(zip(_BUFFERS, fields, strict=True))
        ),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None, init=MBarrier.init, expect=MBarrier.expect, wait=MBarrier.wait,
            arrive=MBarrier.arrive,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=device.copy_in, async_copy_shared_to_global=device.copy_out,
            store_wait=wait_stores,
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": device.warpgroup_mma,
        "warpgroup_mma_wait": wait_products,
    }  # fmt: skip
    return in_place_of_gluon(_MODULES, device, replaced)
