"""Runs the product of weights in groups on a CPU: its own code, on PyTorch's tensors instead of Gluon's.

Programs run one after the other. Products are exact and their sums are in float32. Before the wait for the earlier
kernel only weights may be loaded, and nothing stored.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from kernels.linear.gpu import groups
from tests.kernels import row_products
from tests.kernels.gluon_on_cpu import Array, Pointer, argument, array, in_place_of_gluon
from tests.kernels.linear.matrix_on_cpu import dequantized

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

KERNEL = groups.group_linear.fn


class GroupsDevice:
    """What the kernel uses of Gluon, for one program.

    Args:
        program: its number.
        warps: of a program.
        given: the tensors that an earlier kernel may still write or read.
        pdl: whether the program must wait for the earlier kernel.
    """

    float32, int32, int64, uint8 = torch.float32, torch.int32, torch.int64, torch.uint8
    static_range = range

    def __init__(
        self, program: int, warps: int, given: tuple[torch.Tensor | None, ...], pdl: bool
    ) -> None:
        self._program, self._warps, self._given, self._pdl = program, warps, given, pdl
        self.has_waited, self.has_launched = not pdl, False
        self.loads_ahead = 0

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_: None
        return lambda *given, **_: array(getattr(torch, name)(*given))

    def program_id(self, _axis: int) -> Array:
        return array(self._program)

    def num_warps(self) -> int:
        return self._warps

    def launch_dependents(self) -> None:
        assert self._pdl
        self.has_launched = True

    def wait_for_earlier(self) -> None:
        assert self._pdl
        self.has_waited = True

    def unchanged(self, x: Any, *_: Any) -> Any:
        return x

    multiple_of = max_contiguous = max_constancy = convert_layout = unchanged

    def arange(self, start: int, stop: int, layout: Any) -> Array:
        del layout
        assert (stop - start).bit_count() == 1, "a power of two"
        return array(torch.arange(start, stop, dtype=torch.int32))

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Array:
        del layout
        return array(torch.zeros(shape, dtype=dtype))

    def minimum(self, a: Any, b: Any) -> Array:
        return array(torch.minimum(array(a), array(b)))

    def split(self, x: Array) -> tuple[Array, Array]:
        first, second = x.unbind(-1)
        return array(first), array(second)

    def load(
        self, pointer: Pointer, mask: Any = None, other: Any = None, eviction_policy: str = ""
    ) -> Array:
        assert self.has_waited or not self._is_given(pointer), "an earlier kernel may write it"
        assert not eviction_policy or not self._is_given(pointer), "x is read again"
        self.loads_ahead += not self.has_waited
        places, shown = pointer.places(mask)
        found = pointer.memory.view(-1)[places]
        if mask is None:
            return array(found)
        assert other is not None, "what the mask hides would be undefined"
        return array(torch.where(shown, found, torch.tensor(other, dtype=found.dtype)))

    def store(self, pointer: Pointer, value: Array, mask: Array) -> None:
        assert self.has_waited, "an earlier kernel may read the output"
        assert value.dtype is pointer.memory.dtype
        places, shown = pointer.places(mask)
        pointer.memory.view(-1)[places[shown]] = torch.Tensor(value.expand(places.shape))[shown]

    def mma(self, a: Array, b: Array, acc: Array) -> Array:
        assert a.dtype is b.dtype
        assert acc.dtype is torch.float32
        left, right = torch.Tensor(a.float()), torch.Tensor(b.float())
        return array(torch.Tensor(acc) + row_products.multiply(left, right))

    def widen(self, numbers: Array, dtype: torch.dtype) -> Array:
        assert numbers.dtype is torch.uint8
        return array(torch.Tensor(numbers).byte().view(torch.float8_e4m3fn).to(dtype))

    def _is_given(self, pointer: Pointer) -> bool:
        return any(it is not None and pointer.memory is it for it in self._given)


class GroupsOnCPU:
    """Takes the place of the kernel `group_linear`.

    Attributes:
        loads_ahead: number of loads that started before the wait for the earlier kernel.
    """

    def __init__(self) -> None:
        self.loads_ahead = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        """Return a function that runs the programs of a grid."""

        def launch(*arguments: Any, num_warps: int, launch_pdl: bool = False, **named: Any) -> None:
            assert launch_pdl is named["PDL"]
            x, residual, out = arguments[0], arguments[5], arguments[6]
            given = [argument(it) for it in arguments]
            for program in range(*grid):
                device = GroupsDevice(program, num_warps, (x, residual, out), launch_pdl)
                with _in_place_of_gluon(device):
                    functools.partial(KERNEL, *given, **named)()
                assert device.has_waited
                assert device.has_launched is launch_pdl
                self.loads_ahead += device.loads_ahead

        return launch


def _in_place_of_gluon(device: GroupsDevice) -> AbstractContextManager[None]:
    replaced = {
        "gdc_launch_dependents": device.launch_dependents,
        "gdc_wait": device.wait_for_earlier,
        "mma_v2": device.mma,
        "widen": device.widen,
        "dequantize": dequantized,
        "twice": lambda scale, dtype: scale.to(dtype),
        "products_layout": lambda *_: None,
        "weights_layout": lambda *_: None,
        "apart_layout": lambda *_: None,
        "rows_layout": lambda *_: None,
    }
    return in_place_of_gluon((groups,), device, replaced)
