"""Runs the persistent product on a CPU: its own code, on PyTorch's tensors instead of Gluon's.

The three roles of a program wait for each other at the kernel's barriers; programs run one after the other. Shared
memory begins as NaN.
"""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kernels.linear.gpu import persistent
from tests.kernels.gluon_on_cpu import (
    Array,
    MBarrier,
    MBarriers,
    Pointer,
    Shared,
    argument,
    array,
    box_of,
    constants_of,
    copy_box,
    in_place_of_gluon,
    issue_product,
    names_of_hopper,
    run_roles,
    undefined,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

KERNEL = persistent.persistent_linear.fn
_NAMES = tuple(inspect.signature(KERNEL).parameters)
_CONSTANTS = constants_of(persistent.Constants, (persistent,))


class Device:
    """What the kernel uses of Gluon, for one program at a time."""

    float32, int64 = torch.float32, torch.int64
    static_range = range
    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: None)

    def __init__(self, programs: int) -> None:
        self.program, self.programs = 0, programs

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_: None
        return lambda *given, **_: array(getattr(torch, name)(*given))

    def constexpr(self, x: Any) -> Any:
        return x

    def program_id(self, _axis: int) -> int:
        return self.program

    def num_programs(self, _axis: int) -> int:
        return self.programs

    def thread_barrier(self) -> None:
        """All warps of a role are one thread here."""

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        del layout
        if dtype is self.int64:
            return MBarrier() if len(shape) == 1 else MBarriers(int(shape[0]))
        kind = dtype.of_torch
        return Shared(torch.full([int(size) for size in shape], undefined(kind), dtype=kind))

    def minimum(self, a: Any, b: Any) -> Array:
        return array(torch.minimum(array(a), array(b)))

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return (
            (a if condition else b)
            if isinstance(condition, bool)
            else array(torch.where(condition, a, b))
        )

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Array:
        del layout
        return array(torch.zeros([int(size) for size in shape], dtype=dtype))

    def split(self, x: Array) -> tuple[Array, Array]:
        first, second = x.unbind(-1)
        return array(first), array(second)

    def convert_layout(self, value: Array, layout: Any, assert_trivial: bool) -> Array:
        del layout, assert_trivial
        return value

    def load(self, pointer: Pointer, mask: Array, other: float) -> Array:
        place = torch.where(mask, pointer.offset, 0)
        return array(torch.where(mask, pointer.memory.view(-1)[place], other))

    def store(self, pointer: Pointer, value: Array, mask: Array) -> None:
        mask = mask.expand(value.shape)
        pointer.memory.view(-1)[pointer.offset[mask]] = value[mask]

    def copy(self, desc: Any, where: list[Any], full: MBarrier, target: Shared) -> None:
        """Start to copy a box."""
        copy_box(box_of(desc, where), target, full)

    def warpgroup_mma(
        self, a: Shared, b: Shared, acc: Array, is_async: bool, use_acc: bool = True
    ) -> Array:
        assert is_async
        return issue_product(a, b, acc, use_acc)

    def warp_specialize(
        self, roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]
    ) -> None:
        assert len(warps) == len(registers) == len(roles) - 1
        run_roles(
            [functools.partial(function, *given) for function, given in roles], seed=self.program
        )


class PersistentOnCPU:
    """Takes the place of the kernel `persistent_linear`."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        """Return a function that runs the programs of a grid."""

        def launch(*arguments: Any, num_warps: int, launch_pdl: bool = False, **named: Any) -> None:
            assert num_warps == 4
            assert launch_pdl is named["PDL"]
            names = _NAMES[_NAMES.index("N") :]
            device = Device(*grid)
            given = [argument(it) for it in arguments]
            with _in_place_of_gluon(device):
                for device.program in range(*grid):
                    KERNEL(*given, **{name: named[name] for name in names})

        return launch


def _in_place_of_gluon(device: Device) -> AbstractContextManager[None]:
    replaced = {
        "Constants": _CONSTANTS,
        "Pipeline": lambda *fields: SimpleNamespace(
            **dict(zip(("x", "w", "o", "full", "empty", "started"), fields, strict=True))
        ),
        **names_of_hopper(device),
    }  # fmt: skip
    return in_place_of_gluon((persistent,), device, replaced)
