"""Runs the matrix product on a CPU: its own code, on PyTorch's tensors instead of Gluon's.

A program is one role, which waits for its copies at the kernel's barriers; programs run one after the other in random
order. Shared memory and the output begin as NaN. What needs all threads of a program, or an earlier kernel, is checked
by the order of the calls: see `MatrixDevice`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
from typing import TYPE_CHECKING, Any

import torch

from kernels.linear.gpu import matrix, matrix_groups
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

KERNEL = matrix.matrix_linear.fn
_NAMES = tuple(inspect.signature(KERNEL).parameters)


class Stages(Shared):
    """Shared memory whose shape the kernel asks for."""

    @property
    def shape(self) -> torch.Size:
        return self.memory.shape


class MatrixDevice(Device):
    """What the kernel uses of Gluon, for one program.

    A copy needs a barrier of all threads after the latest wait for products, whose stage it may fill, and a fence and
    such a barrier after the mbarriers are initialized. Before the wait for the earlier kernel only weights may be
    copied, and nothing stored. An output is stored once.

    Args:
        place: the program.
        warps: of a program.
        weights: the descriptor of the weights.
        pdl: whether the program must wait for the earlier kernel.
    """

    def __init__(self, place: tuple[int, ...], warps: int, weights: Any, pdl: bool) -> None:
        super().__init__(programs=0)
        self._place, self._warps, self._weights, self._pdl = place, warps, weights, pdl
        self._barriers: list[MBarrier] = []
        self._are_fenced = self._are_together = self._has_launched = False
        self._has_waited = not pdl
        self.copies_ahead = 0

    def program_id(self, axis: int) -> Any:
        return array(self._place[axis])

    def num_warps(self) -> int:
        return self._warps

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        memory = super().allocate_shared_memory(dtype, shape, layout)
        if isinstance(memory, MBarriers):
            self._barriers += memory.barriers
            return memory
        return Stages(memory.memory)

    def fence(self) -> None:
        self._are_fenced = self._are_initialized()

    def thread_barrier(self) -> None:
        self._are_together = self._are_initialized()

    def launch_dependents(self) -> None:
        assert self._pdl
        self._has_launched = True

    def wait_for_earlier(self) -> None:
        assert self._pdl
        self._has_waited = True

    def copy(self, desc: Any, where: list[Any], full: MBarrier, target: Shared) -> None:
        """Start to copy a box."""
        assert self._are_fenced, "the barriers may not be initialized for copies"
        assert self._are_together, "a thread may still be before its wait"
        assert self._has_waited or desc is self._weights, "an earlier kernel may write the rows"
        self.copies_ahead += not self._has_waited
        assert list(target.memory.shape) == list(map(int, desc.block_type.shape))
        super().copy(desc, where, full, target)

    def wait_products(self, products: Any, left: int, deps: tuple[Any, ...]) -> Any:
        """Wait by `products`."""
        self._are_together = False
        return products(left, deps)

    def widen(self, numbers: Array, dtype: torch.dtype) -> Array:
        """Convert weights in FP8, in registers that an earlier product may not read any more."""
        assert products_in_flight() == 0, "an earlier product may read these registers"
        return numbers.to(dtype)

    def unchanged(self, x: Any, *_: Any) -> Any:
        return x

    def add_scaled(self, acc: Array, product: Array, factors: Array) -> Array:
        """Add products that have ended."""
        assert products_in_flight() == 0, "a product may still write these registers"
        return acc + product * factors[:, None]

    int32 = torch.int32
    multiple_of = max_contiguous = unchanged

    def join(self, a: Array, b: Array) -> Array:
        return array(torch.stack([a, b], -1))

    def dequantize(
        self,
        numbers: Array,
        scale: Array,
        shift: Array,
        dtype: torch.dtype,
        offset: int,
        shifted: bool,
    ) -> tuple[Array, Array]:
        """Convert 4-bit weights in registers as `widen`."""
        assert products_in_flight() == 0, "an earlier product may read these registers"
        return dequantized(numbers, scale, shift, dtype, offset, shifted)

    def convert_layout(self, value: Array, layout: Any, assert_trivial: bool = False) -> Array:
        return super().convert_layout(value, layout, assert_trivial)

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0) -> Array:
        return super().load(pointer, array(mask), other)

    def store(self, pointer: Pointer, value: Array, mask: Array) -> None:
        assert self._has_waited, "an earlier kernel may read the output"
        assert value.dtype is pointer.memory.dtype
        assert value.shape == pointer.offset.shape
        places, shown = pointer.places(mask)
        assert pointer.memory.view(-1)[places[shown]].isnan().all(), "stored twice"
        super().store(pointer, value, mask)

    def check_end(self) -> None:
        """Check what must have happened when the program ends."""
        assert self._has_waited, "the end of this kernel would not be that of earlier ones"
        assert self._has_launched is self._pdl

    def _are_initialized(self) -> bool:
        return all(it.count for it in self._barriers)


def dequantized(
    numbers: Array, scale: Array, shift: Array, dtype: torch.dtype, offset: int, shifted: bool
) -> tuple[Array, Array]:
    """Convert as `kernels.gpu.unpack.dequantize`: of four bytes, 0, 2, 1 and 3."""
    numbers, scale, shift = (
        it.unflatten(-1, (-1, 2, 2)).transpose(-1, -2).flatten(-3) for it in (numbers, scale, shift)
    )
    found = []
    for half in (numbers & 15, numbers >> 4):
        value = (half.to(dtype) - offset) * scale
        found.append(array((value + shift if shifted else value).to(dtype)))
    return found[0], found[1]


class MatrixOnCPU:
    """Takes the place of the kernel `matrix_linear`.

    Attributes:
        grids: of the launches.
        copies_ahead: number of copies that started before the wait for the earlier kernel.
    """

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.copies_ahead = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        """Return a function that runs the programs of a grid."""
        programs = list(itertools.product(*map(range, grid)))
        random.Random(0).shuffle(programs)

        def launch(*arguments: Any, num_warps: int, launch_pdl: bool = False, **named: Any) -> None:
            assert launch_pdl is named["PDL"]
            assert num_warps * 16 == named["OUTPUTS"]
            self.grids.append(grid)
            arguments[_NAMES.index("out")].fill_(torch.nan)
            given = [argument(it) for it in arguments]
            weights = given[_NAMES.index("w_desc")]
            for number, place in enumerate(programs):
                device = MatrixDevice(place, num_warps, weights, launch_pdl)
                with _in_place_of_gluon(device):
                    run_roles([functools.partial(KERNEL, *given, **named)], seed=number)
                device.check_end()
                self.copies_ahead += device.copies_ahead

        return launch


def _in_place_of_gluon(device: MatrixDevice) -> AbstractContextManager[None]:
    names = names_of_hopper(device)
    replaced = names | {
        "fence_async_shared": device.fence,
        "gdc_launch_dependents": device.launch_dependents,
        "gdc_wait": device.wait_for_earlier,
        "widen": device.widen,
        "dequantize": device.dequantize,
        "twice": lambda scale, dtype: scale.to(dtype),
        "bytes_layout": lambda *_: None,
        "fetch_groups": lambda *_: None,
        "add_scaled": device.add_scaled,
        "warpgroup_mma_wait": functools.partial(device.wait_products, names["warpgroup_mma_wait"]),
    }
    return in_place_of_gluon((matrix, matrix_groups), device, replaced)
