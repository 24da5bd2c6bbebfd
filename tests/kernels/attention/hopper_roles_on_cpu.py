"""Runs Hopper's prefill and batch-invariant attention on a CPU: their own roles, on PyTorch's tensors, not Gluon's.

The roles of a thread block wait for each other at the kernel's barriers. Shared memory begins as NaN, and thread
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
    prefill,
    producer,
    scores,
)
from tests.kernels.attention.hopper_decode_on_cpu import DecodeDevice
from tests.kernels.gluon_on_cpu import (
    Array,
    MBarriers,
    NamedBarrier,
    argument,
    array,
    constants_of,
    in_place_of_gluon,
    names_of_hopper,
    run_roles,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_MODULES = (
    consumer, invariant, invariant_roles, part_results, ping_pong, pipeline, prefill, producer, scores,
)  # fmt: skip
_CONSTANTS = constants_of(pipeline.Constants, _MODULES)
_FIRST_BARRIER = 9
_MOST_CONSUMERS = 3
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


class RolesDevice(DecodeDevice):
    """What the roles use of Gluon."""

    def __init__(self, num_programs: int) -> None:
        super().__init__()
        self.programs = num_programs
        self.own = threading.local()
        self.products_of: collections.Counter[int] = collections.Counter()
        self.signals = [NamedBarrier() for _ in range(_MOST_CONSUMERS)]

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype is self.int64:
            return MBarriers(shape[0])
        if dtype is self.int32:
            return Items(shape[0])
        return super().allocate_shared_memory(dtype, shape, layout)

    def constexpr(self, x: Any) -> Any:
        return x

    def warp_specialize(
        self, roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]
    ) -> None:
        assert len(warps) == len(registers) == len(roles) - 1

        def run(index: int) -> None:
            self.own.index = index
            function, given = roles[index]
            function(*given)

        run_roles(
            [functools.partial(run, index) for index in range(len(roles))], seed=self.program[0]
        )

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


class KernelOnCPU:
    """Takes the place of a kernel.

    Attributes:
        products: products that each consumer has issued, by its number.
    """

    def __init__(self, kernel: Any) -> None:
        self.products: collections.Counter[int] = collections.Counter()
        self._kernel = kernel.fn

    def __getitem__(self, grid: tuple[int]) -> Any:
        """Return a function that runs the programs of a grid."""
        programs = list(range(*grid))
        random.Random(0).shuffle(programs)

        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            given = [argument(it) for it in arguments]
            constants = {"PDL": False, **constants}
            names = list(inspect.signature(self._kernel).parameters)
            named = {name: constants[name] for name in names[len(given) :]}
            device = RolesDevice(len(programs))
            with _in_place_of_gluon(device):
                for number in programs:
                    device.program = (number, 0, 0)
                    self._kernel(*given, **named)
            self.products += device.products_of
            assert not any(it.arrived for it in device.signals), "arrivals are left"
            assert not given[names.index("counter")].memory.any()

        return launch


def _in_place_of_gluon(device: RolesDevice) -> AbstractContextManager[None]:
    replaced = {
        "Constants": _CONSTANTS,
        "Pipeline": lambda *fields: SimpleNamespace(
            **dict(zip(_BUFFERS, fields, strict=True))
        ),
        **names_of_hopper(device),
    }  # fmt: skip
    return in_place_of_gluon(_MODULES, device, replaced)
