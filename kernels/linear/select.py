"""Which kernel multiplies a step's rows by a weight matrix, and how it is launched: a pure choice.

A step with few rows is bound by reading the weights. Kernels of ours read them at the speed of memory
and take the neighbouring operations along; from some number of rows on the vendor's library is faster.
Knows shapes and processors, nothing of how a kernel is written.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from kernels.arch import FP8_INSTRUCTIONS, TENSOR_CORES
from kernels.fp8 import FP8

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.arch import GPUArch

VECTOR_COLUMNS = 8
"""Columns that a thread of the vector kernel multiplies at once; a row of weights is a multiple of them."""
WARP_COLUMNS = 32 * VECTOR_COLUMNS
MOST_VECTOR_ROWS = 4
_WIDE_GATED_BYTES = 32 << 20
"""Gated weights from which on three rows or four are more arithmetic than the vector kernel hides behind memory."""
_FEW_ROWS = 2
_FULL_SM_WARPS = 64
_AHEAD_BYTES = 256
"""Weights that a thread may hold in registers before it waits: a quarter of what it can have."""
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, FP8: 1}
_DTYPES = ("bfloat16", "float16", "float32")
_FP8_DTYPES = ("bfloat16", "float16")
_FP8_MULTIPLE = 16
"""What the library's product in FP8 wants inputs and outputs to be multiples of."""


class LinearKernel(enum.Enum):
    """What computes a linear layer."""

    VECTOR = "vector"
    """`kernels.linear.gpu.vector`: one row or a few, on the ordinary cores, all that surrounds it included."""
    LIBRARY = "library"
    """PyTorch's product of matrices, for any number of rows; a norm and a gate are launches of their own.

    Weights in FP8 are converted for it, each time."""
    LIBRARY_FP8 = "library_fp8"
    """PyTorch's product of matrices in FP8: rows are quantised too, in the launch of the norm or one of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearProblem:
    """A linear layer of one step.

    Attributes:
        rows: of the input, at least 1.
        outputs: N, rows of the weights; of one half where `gated`.
        inputs: K, columns of the weights.
        dtype: of input, output and, unless `weight_dtype` says otherwise, weights.
        gated: whether the weights are those of gate and up, and the output is silu(gate) * up.
        weight_dtype: of quantised weights, with a float32 scale for each output: "float8_e4m3fn"; else None.
    """

    rows: int
    outputs: int
    inputs: int
    dtype: str = "bfloat16"
    gated: bool = False
    weight_dtype: str | None = None

    @property
    def matrices(self) -> int:
        """Weight rows for one output."""
        return 2 if self.gated else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one weight."""
        return _ITEM_BYTES[self.weight_dtype or self.dtype]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, which a step reads at least."""
        return self.matrices * self.outputs * self.inputs * self.item_bytes

    def __str__(self) -> str:
        """One line for logs and tables."""
        gated = " gated" if self.gated else ""
        weights = f", weights in {self.weight_dtype}" if self.weight_dtype else ""
        return f"{self.rows} x {self.inputs} to {self.outputs}{gated} in {self.dtype}{weights}"


@dataclasses.dataclass(frozen=True, slots=True)
class LinearLaunch:
    """Tile sizes of the vector kernel.

    Attributes:
        block_n: outputs of a program.
        block_k: columns of the weights that are loaded at once.
        num_warps: of a program.
        ahead: chunks of `block_k` in registers before the wait.
    """

    block_n: int
    block_k: int
    num_warps: int
    ahead: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class LinearChoice:
    """The kernel chosen for a problem.

    Attributes:
        problem: what was asked.
        kernel: what computes it.
        launch: its tile sizes; None for the library's.
        why: one sentence for people.
        measured: whether the choice was made by timing on this architecture.
        unpacks: whether the vector kernel converts FP8 by hand, on GPUs without an instruction for it.
    """

    problem: LinearProblem
    kernel: LinearKernel
    launch: LinearLaunch | None
    why: str
    measured: bool = False
    unpacks: bool = False

    @property
    def padded_rows(self) -> int:
        """Rows that a program computes: a power of two."""
        return 1 << (self.problem.rows - 1).bit_length()

    @property
    def tiles(self) -> int:
        """Programs beside each other over the outputs; 0 for the library."""
        return -(-self.problem.outputs // self.launch.block_n) if self.launch else 0


def select_linear(
    problem: LinearProblem,
    arch: GPUArch,
    table: Callable[[LinearProblem, GPUArch], LinearChoice | None] = lambda *_: None,
) -> LinearChoice:
    """Choose what computes a linear layer; pure, so it also plans for absent hardware.

    Args:
        problem: the layer and its rows.
        arch: where.
        table: looks up what was timed, or returns None; its rows fit the kernels.

    Returns:
        The kernel, its launch and why.
    """
    reason = _objection(problem, arch)
    if reason:
        return _library(problem, arch, reason)
    found = table(problem, arch)
    if found is not None:
        return found
    why = f"not measured for {problem}: "
    if problem.rows > _FEW_ROWS and problem.gated and problem.weight_bytes > _WIDE_GATED_BYTES:
        why += f"{problem.rows} rows of a wide gate were faster in the library where it was timed"
        return _library(problem, arch, why)
    why += f"enough programs to fill {arch.num_sms} SMs"
    launch = vector_default(problem, arch)
    unpacks = problem.weight_dtype is not None and not arch.has_fp8_conversion
    return LinearChoice(problem, LinearKernel.VECTOR, launch, why, unpacks=unpacks)


def _objection(problem: LinearProblem, arch: GPUArch) -> str:
    """Say why the vector kernel does not compute this; empty where it can."""
    tests = (
        (arch.is_cpu, "a CPU has no kernels of ours"),
        *((True, f"the vector kernel {reason}") for reason in arch.unsupported(TENSOR_CORES)),
        (problem.dtype not in _DTYPES, f"no {problem.dtype}"),
        (
            problem.rows > MOST_VECTOR_ROWS,
            f"{problem.rows} rows: the library is faster from {MOST_VECTOR_ROWS + 1} on",
        ),
        (
            problem.inputs % VECTOR_COLUMNS != 0,
            f"{problem.inputs} inputs are not a multiple of {VECTOR_COLUMNS}",
        ),
    )
    return next((reason for refused, reason in tests if refused), "")


def _library(problem: LinearProblem, arch: GPUArch, why: str) -> LinearChoice:
    """Leave a layer to the library, in FP8 where its weights are and it can."""
    if problem.weight_dtype is None:
        return LinearChoice(problem, LinearKernel.LIBRARY, None, why)
    tests = (
        *((True, f"a product in FP8 {reason}") for reason in arch.unsupported(FP8_INSTRUCTIONS)),
        (problem.dtype not in _FP8_DTYPES, f"no product in FP8 with {problem.dtype}"),
        (
            problem.inputs % _FP8_MULTIPLE + problem.matrices * problem.outputs % _FP8_MULTIPLE > 0,
            f"inputs and outputs of a product in FP8 are multiples of {_FP8_MULTIPLE}",
        ),
    )
    reason = next((text for refused, text in tests if refused), "")
    if reason:
        why = f"{why}; weights are converted each time: {reason}"
        return LinearChoice(problem, LinearKernel.LIBRARY, None, why)
    return LinearChoice(problem, LinearKernel.LIBRARY_FP8, None, why)


def vector_default(problem: LinearProblem, arch: GPUArch) -> LinearLaunch:
    """Return a launch that reads all columns at once, in programs that fill the GPU half at least.

    More than four warps wait long for each other where their sums meet.
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
    chunk_bytes = problem.matrices * block_n * block_k * problem.item_bytes // (32 * warps)
    ahead = max(1, min(-(-problem.inputs // block_k), _AHEAD_BYTES // chunk_bytes))
    return LinearLaunch(block_n, block_k, warps, ahead=ahead)


def launch_mistakes(choice: LinearChoice) -> list[str]:
    """List why a launch does not fit its kernel and problem; empty where it does."""
    launch, problem = choice.launch, choice.problem
    if choice.kernel is not LinearKernel.VECTOR:
        return [] if launch is None else ["the library takes no launch"]
    if launch is None:
        return ["has no launch"]
    found = [
        f"{name} is {value}; it must be a power of two"
        for name in ("block_n", "block_k", "num_warps")
        if (value := getattr(launch, name)) < 1 or value.bit_count() != 1
    ]
    if launch.block_k < WARP_COLUMNS * launch.num_warps:
        found.append(f"block_k is {launch.block_k}: less than {WARP_COLUMNS} for each warp")
    if problem.rows > MOST_VECTOR_ROWS:
        found.append(f"{problem.rows} rows are too many")
    if launch.ahead < 1:
        found.append(f"ahead is {launch.ahead}; it must be at least 1")
    return found
