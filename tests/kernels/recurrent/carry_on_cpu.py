"""Runs the kernel that carries states on Hopper on a CPU: its code, on PyTorch's tensors instead of Gluon's.

A program is one role; see `tests.kernels.gluon_on_cpu`.
"""

from __future__ import annotations

import functools
import itertools
import random
from typing import TYPE_CHECKING, Any

import torch

from kernels.recurrent.gpu import gated_delta_hopper
from tests.kernels.gluon_on_cpu import (
    Array,
    MBarrier,
    MBarriers,
    Pointer,
    Shared,
    argument,
    array,
    in_place_of_gluon,
    names_of_hopper,
    products_in_flight,
    run_roles,
)
from tests.kernels.linear.persistent_on_cpu import Device

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

KERNEL = gated_delta_hopper.carry_in_flight.fn


class Stages(Shared):
    """Shared memory whose shape the kernel asks for."""

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape


class CarryDevice(Device):
    """What the kernel uses of Gluon, for one program.

    A copy needs a barrier of all threads after the latest wait for products, whose stage it may fill.

    Args:
        place: the program.
        grid: of the launch.
    """

    int32 = torch.int32

    def __init__(self, place: tuple[int, ...], grid: tuple[int, ...]) -> None:
        super().__init__(programs=0)
        self._place, self._grid = place, grid
        self._are_together = False

    def program_id(self, axis: int) -> Any:
        return array(self._place[axis])

    def num_programs(self, axis: int) -> int:
        return self._grid[axis]

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        memory = super().allocate_shared_memory(dtype, shape, layout)
        return memory if isinstance(memory, MBarriers) else Stages(memory.memory)

    def thread_barrier(self) -> None:
        self._are_together = True

    def copy(self, desc: Any, where: list[Any], full: MBarrier, target: Shared, pred: Any) -> None:
        """Start to copy a box if `pred` holds."""
        if pred:
            assert self._are_together, "a thread may still be before its wait"
            super().copy(desc, where, full, target)

    def wait_products(self, products: Any, left: int, deps: tuple[Any, ...]) -> Any:
        """Wait by `products`."""
        self._are_together = False
        return products(left, deps)

    def maximum(self, a: Any, b: Any) -> Array:
        return array(torch.maximum(array(a), array(b)))

    def sum(self, x: Array, axis: int) -> Array:
        return array(x.sum(axis))

    def to_tensor(self, x: int) -> Array:
        return array(x)

    def convert_layout(self, value: Array, layout: Any, assert_trivial: bool = False) -> Array:
        return super().convert_layout(value, layout, assert_trivial)

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0) -> Array:
        places, shown = pointer.places(mask)
        storage = _storage(pointer.memory)
        found = storage[places + pointer.memory.storage_offset() * shown]
        return array(torch.where(shown, found, torch.as_tensor(other).to(found.dtype)))

    def store(self, pointer: Pointer, value: Array, mask: Any = True) -> None:
        assert value.dtype is pointer.memory.dtype
        places, shown = pointer.places(mask)
        places, shown, value = torch.broadcast_tensors(places, shown, torch.Tensor(value))
        storage = _storage(pointer.memory)
        storage[places[shown] + pointer.memory.storage_offset()] = value[shown]


def _storage(memory: torch.Tensor) -> torch.Tensor:
    """Return all that a tensor is a view of, with one dimension."""
    whole = torch.empty(0, dtype=memory.dtype)
    return whole.set_(memory.untyped_storage())


class CarryOnCPU:
    """Takes the place of the kernel `carry_in_flight`.

    Attributes:
        launches: their number.
    """

    def __init__(self) -> None:
        self.launches = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        """Return a function that runs the programs of a grid."""
        programs = list(itertools.product(*map(range, grid)))
        random.Random(0).shuffle(programs)

        def launch(*arguments: Any, num_warps: int, **named: Any) -> None:
            assert num_warps == 4
            self.launches += 1
            given = [argument(it) for it in arguments]
            for number, place in enumerate(programs):
                with _in_place_of_gluon(CarryDevice(place, grid)):
                    run_roles([functools.partial(KERNEL, *given, **named)], seed=number)
                    assert products_in_flight() == 0

        return launch


def _in_place_of_gluon(device: CarryDevice) -> AbstractContextManager[None]:
    names = names_of_hopper(device)
    wait = functools.partial(device.wait_products, names["warpgroup_mma_wait"])
    replaced = names | {"warpgroup_mma_wait": wait}
    return in_place_of_gluon((gated_delta_hopper,), device, replaced)
