"""The registry of linear layer kernels, most preferred row first.

A projection of a decoder layer is a matrix product with a norm, a gate or a residual addition. A row lists which of
these its kernel absorbs, that is, computes in the same launch; `kernels.linear.projection` computes the others in
separate launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernels.arch import FP8_INSTRUCTIONS, HOPPER, GPUArch
from kernels.linear import group_tiles, persistent_tiles
from kernels.linear.cpu import integers, packed
from kernels.linear.matrix_tiles import (
    FEWEST_FP8_ROWS,
    FEWEST_GROUPS_ROWS,
    FEWEST_ROWS,
    GROUP_COLUMNS,
    ROW_COUNTS,
    most_rows,
)
from kernels.linear.persistent_tiles import INVARIANT_FEWEST_ROWS
from kernels.selection import VectorProblem, reasons, triton_unsupported
from kernels.weight_format import FP8_ROWS, WeightFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.linear.problem import LinearProblem

VECTOR_COLUMNS: Final = 8
"""Columns that a thread of the vector kernel multiplies at once; a row of weights is a multiple of them."""
MOST_VECTOR_ROWS: Final = 4
_HALF_DTYPES: Final = ("bfloat16", "float16")
_MATRIX_MULTIPLE: Final = 64
_FP8_MULTIPLE: Final = 16
"""The library's FP8 product requires inputs and outputs that are multiples of this."""
_NOT_INVARIANT: Final = "the bits of a row depend on the number of rows"


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One way to compute a linear layer.

    Attributes:
        name: for tables, plans and tests.
        target: "module:Class", bound to weights when it is first used.
        limits: returns the reasons, apart from the weights' format, why it cannot compute a problem on a processor.
        formats: in which it reads quantized weights; None for every one, by `Weight.dequantize` at each call where the
            kernel does not read it.
        reads_groups: whether it reads 4-bit numbers with scales of groups, and maybe shifts, and FP8 with scales of
            groups or blocks (`group_tiles.reads`).
        reads_full: whether it reads full numbers of the inputs' dtype.
        absorbs_norm: whether an RMS norm of the input is part of its launch.
        absorbs_gate: whether silu(gate) * up is part of its launch.
        absorbs_residual: whether it adds to the residual stream in place.
        leaves_partials: whether it writes an output for the residual stream as partial sums, which the next norm adds.
        prefetches: whether it loads weights before it waits for its input.
        row_counts: numbers of rows that it is compiled for; other numbers are rounded up to one of these.
        any_rows: whether one choice holds for any number of rows. If it absorbs norms too, its product computes all
            operations around it: it is a `kernels.linear.projection.FusedProduct`.
        copies_weights: whether it keeps a copy of the weights in its own layout.
        converts: whether it reads full numbers of any dtype, which it converts at each call.
    """

    name: str
    target: str
    limits: Callable[[LinearProblem, GPUArch], tuple[str, ...]]
    formats: tuple[WeightFormat, ...] | None = ()
    reads_groups: bool = False
    reads_full: bool = True
    absorbs_norm: bool = False
    absorbs_gate: bool = False
    absorbs_residual: bool = False
    leaves_partials: bool = False
    prefetches: bool = False
    row_counts: tuple[int, ...] = ()
    any_rows: bool = False
    copies_weights: bool = False
    converts: bool = False

    def reads(self, form: WeightFormat) -> bool:
        """Whether its kernel reads quantized weights in a format as they are."""
        is_listed = self.formats is not None and form in self.formats
        return is_listed or (self.reads_groups and group_tiles.reads(form))

    def unsupported(self, problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
        """List why it cannot compute a problem on a processor; empty if it can."""
        form = problem.format
        found = self.limits(problem, arch)
        if not form.is_quantized:
            return found + reasons(
                (not self.reads_full, "weights are not quantized"),
                (problem.in_place and not self.converts, "weights are read where they are"),
            )
        if self.formats is None or self.reads(form):
            return found
        reads_some = self.formats or self.reads_groups
        return (*found, f"no weights in {form.name}" if reads_some else "weights are quantized")


def _gpu_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    """List the reasons that apply to all rows for GPUs, which need the Triton kernels around their product."""
    return triton_unsupported(VectorProblem(problem.dtype, problem.trainable), arch)


def _vector_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    in_fp8 = problem.format.is_quantized
    return _gpu_unsupported(problem, arch) + reasons(
        (problem.batch_invariant, "for few rows only"),
        (
            in_fp8 and problem.rows >= FEWEST_FP8_ROWS and not MATRIX.unsupported(problem, arch),
            f"tensor cores are faster from {FEWEST_FP8_ROWS} rows on with weights in FP8",
        ),
        (
            problem.rows > MOST_VECTOR_ROWS,
            f"{problem.rows} rows: others are faster from {MOST_VECTOR_ROWS + 1} on",
        ),
        (
            problem.inputs % VECTOR_COLUMNS != 0,
            f"{problem.inputs} inputs are not a multiple of {VECTOR_COLUMNS}",
        ),
    )


def _hopper_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    """List the reasons that apply to the kernels for Hopper's tensor cores."""
    sizes = (problem.matrices * problem.outputs, problem.inputs)
    odd = next((size for size in sizes if size % _MATRIX_MULTIPLE), None)
    return arch.unsupported(HOPPER) + reasons(
        (problem.trainable, "not differentiable"),
        (
            problem.layer_weights == 0 and not problem.batch_invariant,
            "for the projections of a decoder layer only",
        ),
        (problem.dtype not in _HALF_DTYPES, f"no {problem.dtype}"),
        (problem.bias and (problem.gated or problem.residual), "no bias with a gate or a residual"),
        (odd is not None, f"a size of {odd} is not a multiple of {_MATRIX_MULTIPLE}"),
    )


def _persistent_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    # Its gain is the gate, whose own launch takes a tenth of the time of a prompt: with a gate it is 0.99 to 1.32 times
    # as fast as the library, measured on an H100 with 256, 1024 and 4096 rows; without, 0.6 to 1.02 times.
    most = (
        INVARIANT_FEWEST_ROWS - 1
        if problem.batch_invariant
        else most_rows(
            problem.layer_weights, bits=problem.format.bits, in_groups=problem.format.group > 0
        )
    )
    return _hopper_unsupported(problem, arch) + reasons(
        (problem.rows <= most, f"{problem.rows} rows: others are used up to {most}"),
        (
            not problem.batch_invariant and not problem.gated,
            "the library is faster where there is no gate",
        ),
    )


def _matrix_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    form = problem.format
    fewest = FEWEST_ROWS
    if form.is_quantized:
        fewest = FEWEST_GROUPS_ROWS if form.group else FEWEST_FP8_ROWS
    most = most_rows(problem.layer_weights, bits=form.bits, in_groups=form.group > 0)
    return _hopper_unsupported(problem, arch) + reasons(
        (form.is_quantized and problem.batch_invariant, "weights are quantized"),
        (
            form.float and form.group % GROUP_COLUMNS > 0,
            f"FP8 in groups of {form.group}, not of a multiple of {GROUP_COLUMNS}",
        ),
        (
            not problem.batch_invariant and not fewest <= problem.rows <= most,
            f"{problem.rows} rows: others are faster outside {fewest} to {most}",
        ),
    )


def _groups_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    most = group_tiles.MOST_ROWS
    return _gpu_unsupported(problem, arch) + reasons(
        (problem.batch_invariant, "for few rows only"),
        (problem.dtype not in _HALF_DTYPES, f"no product on tensor cores with {problem.dtype}"),
        (
            not MATRIX.unsupported(problem, arch),
            f"{problem.rows} rows: Hopper's tensor cores are faster",
        ),
        (problem.rows > most, f"{problem.rows} rows: others are faster from {most + 1} on"),
        (
            problem.inputs % group_tiles.COLUMNS_UNIT > 0,
            f"{problem.inputs} inputs are not a multiple of {group_tiles.COLUMNS_UNIT}",
        ),
    )


def _invariant_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    return _gpu_unsupported(problem, arch) + reasons(
        (not problem.batch_invariant, "others are faster where bits may depend on the batch")
    )


def _library_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    return _gpu_unsupported(problem, arch) + reasons((problem.batch_invariant, _NOT_INVARIANT))


def _pytorch_unsupported(problem: LinearProblem, _arch: GPUArch) -> tuple[str, ...]:
    return reasons((problem.batch_invariant, _NOT_INVARIANT))


def _fp8_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    sizes = (problem.inputs, problem.matrices * problem.outputs)
    return (
        _library_unsupported(problem, arch)
        + arch.unsupported(FP8_INSTRUCTIONS)
        + reasons(
            (problem.dtype not in _HALF_DTYPES, f"no product in FP8 with {problem.dtype}"),
            (
                any(size % _FP8_MULTIPLE for size in sizes),
                f"inputs and outputs of a product in FP8 are multiples of {_FP8_MULTIPLE}",
            ),
        )
    )


def _packed_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    return reasons(
        (not arch.is_cpu, "needs a CPU"),
        (problem.trainable, "not differentiable"),
        (problem.batch_invariant, _NOT_INVARIANT),
    ) + packed.unsupported(problem.dtype)


def _integers_unsupported(problem: LinearProblem, arch: GPUArch) -> tuple[str, ...]:
    found = reasons(
        (not arch.is_cpu, "needs a CPU"),
        (problem.trainable, "not differentiable"),
        (not problem.format.is_quantized, "weights are not quantized"),
        (not problem.rounds_inputs, "inputs are not to be rounded: set --dtype auto"),
    )
    return found or integers.unsupported(problem)


VECTOR: Final = LinearSpec(
    name="vector",
    target="kernels.linear.gpu.vector:VectorLinear",
    limits=_vector_unsupported,
    formats=(FP8_ROWS,),
    absorbs_norm=True,
    absorbs_gate=True,
    absorbs_residual=True,
    row_counts=(1, 2, 4),
)
"""1 to 4 rows, without tensor cores; of weights in FP8 that `matrix` supports 1 or 2."""
GROUPS: Final = LinearSpec(
    name="groups",
    target="kernels.linear.gpu.groups:GroupsLinear",
    limits=_groups_unsupported,
    reads_groups=True,
    reads_full=False,
    absorbs_gate=True,
    absorbs_residual=True,
    row_counts=(1, 8, 16),
)
"""1 to 16 rows of weights of 4 bits or in FP8 with scales of groups, on any tensor cores for which Triton has
`mma.sync`."""
PERSISTENT: Final = LinearSpec(
    name="persistent",
    target="kernels.linear.gpu.persistent:PersistentLinear",
    limits=_persistent_unsupported,
    absorbs_gate=True,
    leaves_partials=True,
    prefetches=True,
    row_counts=persistent_tiles.ROW_COUNTS,
)
"""Many rows, on Hopper's tensor cores, where it is faster than others; batch invariant."""
MATRIX: Final = LinearSpec(
    name="matrix",
    target="kernels.linear.gpu.matrix:MatrixLinear",
    limits=_matrix_unsupported,
    formats=(FP8_ROWS,),
    reads_groups=True,
    absorbs_gate=True,
    leaves_partials=True,
    prefetches=True,
    row_counts=ROW_COUNTS,
)
"""5 to 256 rows, with weights in FP8 from 3 on, with scales of groups from 9 on, on Hopper's tensor cores; batch
invariant for any number of rows."""
INVARIANT: Final = LinearSpec(
    name="invariant",
    target="kernels.linear.gpu.invariant:InvariantLinear",
    limits=_invariant_unsupported,
    formats=None,
    leaves_partials=True,
)
"""Any number of rows, batch invariant."""
LIBRARY_FP8: Final = LinearSpec(
    name="library_fp8",
    target="kernels.linear.library:LibraryFP8Linear",
    limits=_fp8_unsupported,
    formats=(FP8_ROWS,),
    reads_full=False,
    absorbs_norm=True,
    absorbs_residual=True,
)
"""The vendor library's FP8 product; the rows are quantized too, in the launch of the norm or a separate one."""
LIBRARY: Final = LinearSpec(
    name="library",
    target="kernels.linear.library:LibraryLinear",
    limits=_library_unsupported,
    formats=None,
    absorbs_residual=True,
)
"""The vendor library's product, for any number of rows; quantized weights are converted at each call."""
INTEGERS: Final = LinearSpec(
    name="cpu_integers",
    target="kernels.linear.cpu.integers:CPULibraryLinear",
    limits=_integers_unsupported,
    formats=None,
    absorbs_norm=True,
    absorbs_gate=True,
    absorbs_residual=True,
    any_rows=True,
    copies_weights=True,
)
"""The C library's product of weights of 8 or 4 bits on a CPU, with activations rounded to 8 bits; batch invariant."""
PACKED: Final = LinearSpec(
    name="packed",
    target="kernels.linear.cpu.packed:PackedLinear",
    limits=_packed_unsupported,
    any_rows=True,
    copies_weights=True,
)
"""The products of oneDNN and FBGEMM on a CPU, with weights in their blocked layouts."""
PYTORCH: Final = LinearSpec(
    name="pytorch",
    target="kernels.linear.pytorch:PyTorchLinear",
    limits=_pytorch_unsupported,
    formats=None,
    any_rows=True,
    converts=True,
)
"""Differentiable, on every device."""

REGISTRY: Final = (
    VECTOR,
    GROUPS,
    PERSISTENT,
    MATRIX,
    INVARIANT,
    LIBRARY_FP8,
    LIBRARY,
    INTEGERS,
    PACKED,
    PYTORCH,
)
