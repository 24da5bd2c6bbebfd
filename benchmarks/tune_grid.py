"""The launch configurations that `benchmarks.tune_attention` tries for each kernel."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from benchmarks.attention_shapes import ELEMENT_BYTES
from kernels.attention.launch import LaunchConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernels.arch import GPUArch

PROGRAMS_PER_SM = (1, 2, 3, 4, 6, 8)
"""Tried with the best decode configurations of a row; they do not change the compiled code."""
_ACCUMULATOR_REGISTERS = 160
"""Maximum 32-bit words of output per thread; the scores and their exponentials need the other registers."""
_PREFILL_ROWS, _PREFILL_KEYS = (64, 128), (32, 64, 128)
_DECODE_ROWS, _DECODE_KEYS = (16,), (16, 32, 64, 128)
_FLOAT32_ROWS, _FLOAT32_KEYS = (16, 32, 64), (16, 32, 64)
_HOPPER_ROWS, _HOPPER_KEYS = {128: 176, 192: 128}, (32, 64, 128)
"""`_HOPPER_ROWS` maps the rows of a tile to the maximum 32-bit words per thread; configurations with more spill."""
_HOPPER_BARRIERS = 512
_BLACKWELL_ROWS, _BLACKWELL_KEYS = 256, 128
_UNROLLED = 4096
"""Maximum multiplications per thread of a float32 product. Tensor cores do not compute these, and the compiler unrolls
them, which takes 10 seconds for 2048."""


def candidates(
    kernel: str, head_dim: int, dtype: str, arch: GPUArch, skip: Iterable[dict[str, Any]] = ()
) -> list[LaunchConfig]:
    """Return the grid of a kernel, without configurations that do not fit the GPU or match `skip`.

    Args:
        kernel: name of the registry row.
        head_dim: D.
        dtype: dtype of the tensors.
        arch: architecture, for the size of its shared memory.
        skip: records of "kernel", "head_dim", "dtype" and launch fields; a configuration is left out if it matches all
            entries of a record.
    """
    if kernel == "hopper_prefill":
        grid = _hopper_prefill_grid(head_dim, arch)
    elif kernel == "blackwell_prefill":
        return [
            LaunchConfig(_BLACKWELL_ROWS, _BLACKWELL_KEYS, 4, stages)
            for stages in (2, 3, 4)
            if _blackwell_shared_bytes(stages, head_dim) <= arch.shared_memory_bytes
        ]
    elif "decode" in kernel:
        grid = [
            LaunchConfig(m, n, warps, stages, 2)
            for m, n, warps, stages in itertools.product(
                _DECODE_ROWS, _DECODE_KEYS, (1, 2, 4, 8), (1, 2, 3, 4, 5)
            )
        ]
    else:
        grid = [
            LaunchConfig(m, n, warps, stages, one_loop=one_loop)
            for one_loop, m, n, warps, stages in itertools.product(
                (False, True),
                _FLOAT32_ROWS if dtype == "float32" else _PREFILL_ROWS,
                _FLOAT32_KEYS if dtype == "float32" else _PREFILL_KEYS,
                (4, 8),
                (1, 2) if dtype == "float32" else (1, 2, 3, 4),
            )
        ]
    if kernel != "hopper_prefill":
        grid = [launch for launch in grid if _fits(launch, head_dim, dtype, arch)]
    facts = {"kernel": kernel, "head_dim": head_dim, "dtype": dtype}
    records = list(skip)
    return [launch for launch in grid if not _skipped(launch, facts, records)]


def _hopper_prefill_grid(head_dim: int, arch: GPUArch) -> list[LaunchConfig]:
    """Return the configurations that fit the shared memory and the registers of the consumers, of 64 rows each."""
    return [
        LaunchConfig(m, n, 4, stages)
        for m, n, stages in itertools.product(_HOPPER_ROWS, _HOPPER_KEYS, (2, 3, 4, 6))
        # Output, scores and their exponentials of a thread, in 32-bit words.
        if head_dim / 2 + n / 2 + n / 4 <= _HOPPER_ROWS[m]
        and _hopper_shared_bytes(m, n, stages, head_dim) <= arch.shared_memory_bytes
    ]


def _hopper_shared_bytes(m: int, n: int, stages: int, head_dim: int) -> int:
    """Return the bytes of shared memory for the buffers and barriers of `kernels.attention.hopper.pipeline`."""
    parts = 2 if m == 128 else 4
    tiles = (
        2 if head_dim <= 128 else 1
    )  # up to 128, a part of the output uses the memory of its queries
    return 2 * head_dim * (parts * tiles * 64 + 2 * stages * n) + _HOPPER_BARRIERS


def _blackwell_shared_bytes(stages: int, head_dim: int) -> int:
    """Return the bytes for queries, stages and half-precision outputs of 64 columns, and for barriers."""
    rows = _BLACKWELL_ROWS + 2 * stages * _BLACKWELL_KEYS
    return 2 * (head_dim * rows + 64 * _BLACKWELL_ROWS) + 2 * _HOPPER_BARRIERS


def _fits(launch: LaunchConfig, head_dim: int, dtype: str, arch: GPUArch) -> bool:
    size = ELEMENT_BYTES[dtype]
    unrolled = launch.block_m * launch.block_n * head_dim / (32 * launch.num_warps)
    if dtype == "float32" and unrolled > _UNROLLED:
        return False
    tile = launch.block_n * head_dim * size
    # With one stage there is no pipeline, and therefore no second copy in shared memory.
    shared = 2 * tile * launch.num_stages if launch.num_stages > 1 else 2 * tile
    threads = 32 * launch.num_warps
    accumulator = launch.block_m * head_dim / threads
    scores = launch.block_m * launch.block_n / threads
    keys = launch.block_n * head_dim * size / 4 / threads
    return (
        shared <= arch.shared_memory_bytes
        and accumulator <= _ACCUMULATOR_REGISTERS
        and accumulator + scores <= 1.5 * _ACCUMULATOR_REGISTERS
        and (keys <= _ACCUMULATOR_REGISTERS or launch.block_m >= 64)
        # With fewer keys per warp, warps compute the same results redundantly.
        and (launch.block_m >= 64 or launch.block_n >= 8 * launch.num_warps)
    )


def _skipped(launch: LaunchConfig, facts: dict[str, Any], records: list[dict[str, Any]]) -> bool:
    known = facts | dataclasses.asdict(launch)
    return any(
        all(known[key] == value for key, value in record.items() if key in known)
        for record in records
    )
