"""Runs the warp roles of Hopper's one-pass backward on a CPU: their own code, on PyTorch's tensors instead of Gluon's.

The two roles wait for each other at the kernel's barriers. Shared memory begins as NaN, and thread blocks run one after
the other in random order.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from kernels.attention.training.hopper import backward_roles, backward_tiles
from tests.kernels.gluon_on_cpu import (
    Array,
    MBarrier,
    MBarriers,
    NamedBarrier,
    Pointer,
    Shared,
    argument,
    array,
    box_of,
    copy_box,
    in_place_of_gluon,
    issue_product,
    names_of_hopper,
    run_roles,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Device:
    """What the roles use of Gluon, for one thread block at a time; `masked` counts the tiles that are masked."""

    float32, int32, int64, uint32 = torch.float32, torch.int32, torch.int64, torch.uint32
    static_range = range

    def __init__(self) -> None:
        self.program = (0, 0, 0)
        self.named: dict[int, NamedBarrier] = {}
        self.products = self.masked = 0

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *_: None
        return lambda *given, **_: array(getattr(torch, name)(*given))

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def maximum(self, a: Any, b: Any) -> Any:
        return max(a, b)

    def minimum(self, a: Any, b: Any) -> Any:
        return min(a, b)

    def zeros(self, shape: list[int], dtype: torch.dtype, layout: Any) -> Array:
        del layout
        return array(torch.zeros(shape, dtype=dtype))

    def convert_layout(self, value: Array, layout: Any, assert_trivial: bool) -> Array:
        del layout, assert_trivial
        return value

    def thread_barrier(self) -> None:
        """All warps of the consumers are one thread here."""

    def load(self, pointer: Pointer) -> Array:
        return array(pointer.memory[pointer.offset])

    def store(self, pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        mask = mask.expand(value.shape)
        pointer.memory.view(-1)[pointer.offset[mask]] = value[mask]

    def atomic_add(self, pointer: Pointer, value: torch.Tensor, sem: str) -> None:
        assert sem == "relaxed"
        places = pointer.offset.flatten()
        assert len(places.unique()) == len(places)
        pointer.memory[places] += value.flatten()

    def inline_asm_elementwise(
        self, code: str, constraints: str, values: list[int], **_: Any
    ) -> None:
        assert "288" in code
        assert constraints == "=r,r"
        (number,) = map(int, values)
        barrier = self.named[number]
        if code.startswith("bar.arrive"):
            barrier.arrive()
        else:
            barrier.wait()

    def warpgroup_mma(self, *arguments: Any, is_async: bool, **named: Any) -> Array:
        assert is_async
        self.products += 1
        return issue_product(*arguments, **named)

    def copy(self, desc: Any, where: list[Any], full: MBarrier, target: Shared) -> None:
        """Start to copy a box."""
        copy_box(box_of(desc, where), target, full)


class BackwardOnCPU:
    """Takes the place of the kernel `backward`; `tiles` and `masked` count the tiles that it visits."""

    def __init__(self) -> None:
        self.tiles = self.masked = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        """Return a function that runs the programs of a grid."""
        programs = list(itertools.product(*map(range, grid)))
        random.Random(0).shuffle(programs)

        def launch(*arguments: Any, **constants: Any) -> None:
            device = Device()
            with _in_place_of_gluon(device):
                for device.program in programs:
                    _run(device, SimpleNamespace(**constants), *arguments)
            self.tiles += device.products // 5
            self.masked += device.masked

        return launch


def _run(
    device: Device, c: SimpleNamespace, q: Any, k: Any, v: Any, do: Any, stats: Any, sums: torch.Tensor,
    dk: torch.Tensor, dv: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, scale: float, scale_log2: float,
    window: int,
) -> None:  # fmt: skip
    c.S_LAYOUT = c.KV_LAYOUT = c.Q_LAYOUT = c.P_LAYOUT = None
    dtype = q.base.dtype

    def shared(*shape: int, dtype: torch.dtype = dtype) -> Shared:
        return Shared(torch.full(shape, torch.nan, dtype=dtype))

    buffers = SimpleNamespace(
        k=shared(1, c.BLOCK_N, c.D),
        v=shared(1, c.BLOCK_N, c.D),
        q=shared(c.STAGES, c.BLOCK_M, c.D),
        do=shared(c.STAGES, c.BLOCK_M, c.D),
        ds=shared(1, c.BLOCK_N, c.BLOCK_M),
        stats=shared(c.STAGES, 2 * c.BLOCK_M, dtype=torch.float32),
        kv_full=MBarriers(2, 1),
        q_full=MBarriers(c.STAGES, 1),
        do_full=MBarriers(c.STAGES, 1),
    )
    device.named = {9 + i: NamedBarrier() for i in range(c.STAGES)}
    descs = [argument(it) for it in (q, k, v, do, stats)]

    def role(function: Any, *arguments: Any) -> Any:
        return lambda: function.fn(
            buffers, Pointer(cu_q), Pointer(cu_k), *arguments, array(window), c
        )

    run_roles(
        [
            role(PRODUCE, *descs),
            role(CONSUME, Pointer(sums), Pointer(dk), Pointer(dv), scale_log2, scale),
        ],
        seed=sum(device.program),
    )
    assert not any(it.arrived for it in device.named.values()), "arrivals are left"


PRODUCE, CONSUME = backward_roles.produce, backward_roles.consume


def _in_place_of_gluon(device: Device) -> AbstractContextManager[None]:
    masked = backward_roles._mask.fn

    def mask(*arguments: Any) -> Any:
        device.masked += 1
        return masked(*arguments)

    replaced = {
        **names_of_hopper(device),
        "_mask": mask,
        "Tile": lambda *fields: SimpleNamespace(**dict(zip(_FIELDS, fields, strict=True))),
    }
    return in_place_of_gluon((backward_roles, backward_tiles), device, replaced)


_FIELDS = ("first", "kv_head", "start_q", "num_q", "start_k", "num_k", "scratch")
