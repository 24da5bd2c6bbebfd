"""Selects the kernel of a linear layer and its launch, as a pure function.

A step with few rows is bound by reading the weights. The kernels of this package read them at memory bandwidth and
include the neighbouring operations; above some number of rows the vendor's library is faster.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from kernels.linear.registry import REGISTRY, VECTOR, VECTOR_COLUMNS, LinearSpec
from kernels.selection import Refusal, choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.arch import GPUArch
    from kernels.linear.problem import LinearProblem

WARP_COLUMNS: Final = 32 * VECTOR_COLUMNS
_WIDE_GATED_BYTES: Final = 32 << 20
"""From this size of gated weights on, 3 or 4 rows take the vector kernel more time for arithmetic than for reads."""
_FEW_ROWS: Final = 2
_FULL_SM_WARPS: Final = 64
_AHEAD_BYTES: Final = 256
"""Weights that a thread may load to registers before it waits: a quarter of its registers."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearLaunch:
    """Tile sizes of the vector kernel.

    Attributes:
        block_n: outputs per program.
        block_k: columns of the weights that are loaded at once.
        num_warps: per program.
        ahead: chunks of `block_k` columns that are loaded to registers before the wait.
    """

    block_n: int
    block_k: int
    num_warps: int
    ahead: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class TunedLinear:
    """The fastest measured kernel for a problem.

    Attributes:
        kernel: name of the registry row.
        launch: its tile sizes; None for the library.
        provenance: source of the measurement, in words.
    """

    kernel: str
    launch: LinearLaunch | None
    provenance: str


@dataclasses.dataclass(frozen=True, slots=True)
class LinearChoice:
    """The kernel chosen for a problem.

    Attributes:
        problem: the layer and its rows.
        spec: the row of the registry.
        launch: its tile sizes; None if the row has none.
        why: the reason for the choice, in one sentence.
        measured: whether the choice is based on timings on this architecture.
        unpacks: whether the vector kernel converts FP8 by bit operations, on GPUs without an instruction for it.
        refusals: the registry rows that were passed over.
    """

    problem: LinearProblem
    spec: LinearSpec
    launch: LinearLaunch | None
    why: str
    measured: bool = False
    unpacks: bool = False
    refusals: tuple[Refusal, ...] = ()

    @property
    def padded_rows(self) -> int:
        """Rows that a program of the vector kernel computes: a power of two."""
        return 1 << (self.problem.rows - 1).bit_length()

    @property
    def tiles(self) -> int:
        """Programs of the vector kernel along the outputs; 0 for other kernels."""
        return -(-self.problem.outputs // self.launch.block_n) if self.launch else 0


def select_linear(
    problem: LinearProblem,
    arch: GPUArch,
    table: Callable[[LinearProblem, GPUArch], TunedLinear | None] = lambda *_: None,
) -> LinearChoice:
    """Choose the kernel of a linear layer; pure, so it also plans for absent hardware.

    Args:
        problem: the layer and its rows.
        arch: the processor.
        table: looks up measured launches; returns None where there is none.

    Returns:
        The first row that supports the problem and was not measured to be slower, with its launch and the reason.

    Raises:
        NoKernelError: no row supports a batch-invariant problem; the message has the reasons of every row.
    """
    against = VECTOR.unsupported(problem, arch)
    tuned = None if against else table(problem, arch)
    against = against or _slower(problem, tuned)
    spec, why, refusals = choose(
        REGISTRY,
        lambda row: against if row is VECTOR else row.unsupported(problem, arch),
        problem,
        arch,
    )
    launch, measured = None, False
    if spec is VECTOR and tuned is not None:
        launch, why, measured = tuned.launch, tuned.provenance, True
    elif spec is VECTOR:
        launch = vector_default(problem, arch)
        why = f"not measured for {problem}: enough programs to fill {arch.num_sms} SMs"
    return LinearChoice(
        problem,
        spec,
        launch,
        why,
        measured=measured,
        unpacks=problem.format.is_quantized
        and problem.format.float
        and not arch.has_fp8_conversion,
        refusals=refusals,
    )


def _slower(problem: LinearProblem, tuned: TunedLinear | None) -> tuple[str, ...]:
    """List why the vector kernel is not the fastest for a problem that it supports."""
    if tuned is not None:
        return () if tuned.kernel == VECTOR.name else (tuned.provenance,)
    if problem.rows > _FEW_ROWS and problem.gated and problem.weight_bytes > _WIDE_GATED_BYTES:
        rows = problem.rows
        return (f"{rows} rows of a wide gate were faster in the library where it was timed",)
    return ()


def vector_default(problem: LinearProblem, arch: GPUArch) -> LinearLaunch:
    """Return a launch that reads all columns at once, with enough programs to fill at least half of the GPU.

    It has at most four warps, because the reduction across more warps is slow.
    """
    warps = 1
    while warps < 4 and 2 * warps * WARP_COLUMNS <= problem.inputs:
        warps *= 2
    block_k = warps * WARP_COLUMNS
    block_n, most = 1, 8 // problem.matrices // (2 if problem.rows > 1 else 1)
    while (
        block_n < most
        and problem.outputs // (2 * block_n) * warps >= arch.num_sms * _FULL_SM_WARPS // 2
    ):
        block_n *= 2
    chunk_bytes = problem.matrices * block_n * block_k * problem.format.bits // 8 // (32 * warps)
    ahead = max(1, min(-(-problem.inputs // block_k), _AHEAD_BYTES // chunk_bytes))
    return LinearLaunch(block_n, block_k, warps, ahead=ahead)
