"""Runs Hopper's decode kernels on a CPU: their own code, on PyTorch's tensors instead of Gluon's.

A thread block is one thread, so barriers between threads have no meaning. Shared memory begins as NaN, and thread
blocks run one after the other in random order.
"""

from __future__ import annotations

import functools
import inspect
import random
from types import SimpleNamespace
from typing import Any

import torch

from kernels.attention.hopper import decode, keys_on_m, merge, ping_pong, pipeline, producer, scores
from tests.kernels.attention.hopper_backward_on_cpu import Device
from tests.kernels.gluon_on_cpu import (
    MBarrier,
    MBarriers,
    Pointer,
    Shared,
    argument,
    array,
    constants_of,
    in_place_of_gluon,
    names_of_hopper,
    run_roles,
)

KERNEL = decode.decode.fn
_NAMES = tuple(inspect.signature(KERNEL).parameters)
_MODULES = (decode, keys_on_m, merge, ping_pong, pipeline, producer, scores)
_CONSTANTS = constants_of(merge.DecodeConstants, _MODULES)


class Tiles(Shared):
    """Shared memory for operands of products, [..., rows, columns]."""

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        """Return a box of all columns, or those of 64 in the order of the memory: the first columns come first."""
        del dtype, layout
        count, *box = map(int, shape)
        if box[-1] == self.memory.shape[-1] and len(box) < 3:
            return Tiles(self.memory.view(count, *box))
        columns = self.memory.split(box[-1], -1)
        parts = [part for it in columns for part in it.split(box[0] * box[1], 0)]
        assert len(parts) == count
        return Boxes([Tiles(part.unflatten(0, box[:2])) for part in parts])


class Boxes(list[Tiles]):
    """The boxes of a tile."""

    def index(self, i: Any) -> Tiles:
        return self[int(i)]


class DecodeDevice(Device):
    """What the decode uses of Gluon."""

    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: None)

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        del layout
        sizes = [int(size) for size in shape]
        if dtype is self.int64:
            return MBarrier() if sizes == [1] else MBarriers(sizes[0])
        return Tiles(torch.full(sizes, torch.nan, dtype=getattr(dtype, "of_torch", dtype)))

    def program_id(self, axis: int) -> Any:
        return array(self.program[axis])

    def maximum(self, a: Any, b: Any) -> Any:
        return torch.maximum(array(a), array(b))

    def minimum(self, a: Any, b: Any) -> Any:
        return torch.minimum(array(a), array(b))

    def max(self, x: Any, axis: int) -> Any:
        return x.amax(axis)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Any:
        return self.full(shape, 0, dtype, layout)

    def full(self, shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> Any:
        del layout
        return array(torch.full([int(size) for size in shape], value, dtype=dtype))

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        del layout, assert_trivial
        return value

    def load(
        self, pointer: Pointer, mask: Any = True, other: float = 0, cache_modifier: str = ""
    ) -> Any:
        del cache_modifier
        memory, place, mask = pointer.memory.reshape(-1), array(pointer.offset), array(mask)
        place, mask = torch.broadcast_tensors(place, mask)
        return array(torch.where(mask, memory[torch.where(mask, place, 0)], other))

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        place, mask, value = torch.broadcast_tensors(*map(array, (pointer.offset, mask, value)))
        pointer.memory.view(-1)[place[mask]] = value[mask].to(pointer.memory.dtype)

    def atomic_add(self, pointer: Pointer, value: int, sem: str = "acq_rel") -> Any:
        assert sem == "acq_rel"
        before = self.load(pointer).clone()
        self.store(pointer, before + value)
        return before


class DecodeOnCPU:
    """Takes the place of the kernel `decode`; `runs` counts its launches."""

    def __init__(self) -> None:
        self.runs = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        """Return a function that runs the programs of a grid."""
        programs = list(range(*grid))
        random.Random(0).shuffle(programs)

        def launch(*arguments: Any, num_warps: int, **constants: Any) -> None:
            assert num_warps == 4
            self.runs += 1
            constants = {"PDL": False, **constants}
            given = [argument(it) for it in arguments]
            device = DecodeDevice()
            replaced = {
                "DecodeConstants": _CONSTANTS,
                "fetch_ahead": lambda _: None,
                **names_of_hopper(device),
            }
            with in_place_of_gluon(_MODULES, device, replaced):
                for number in programs:
                    device.program = (number, 0, 0)
                    named = {name: constants[name] for name in _NAMES[len(given) :]}
                    run_roles([functools.partial(KERNEL, *given, **named)], seed=number)

        return launch
