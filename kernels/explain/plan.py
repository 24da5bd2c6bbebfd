"""Which kernel attends, with which launch, and why: the plan of a model on a processor as plain data.

For each phase and some step sizes it says what would run and how fast the processor could do it at
best. Pure: it also explains for hardware that is not there. Knows no model and times nothing;
`explain_text` writes it for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.attention.problem import AttentionProblem, LaunchConfig, Phase, select
from kernels.attention.registry import REGISTRY
from kernels.attention.splits import BATCH_INVARIANT_SPLIT_TOKENS, plan_splits, splits_wanted
from kernels.explain.roofline import attention_work, roofline
from kernels.tuning import tuned_launches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.arch import GPUArch
    from kernels.attention.problem import Selection
    from kernels.attention.spec import KernelSpec

PREFILL_STEPS = ((1, 128, 128), (1, 512, 512), (1, 2048, 2048), (1, 8192, 8192), (1, 512, 8192))
"""Sequences, new tokens of each, and its tokens in all; the last is a chunk after a history."""
DECODE_STEPS = ((1, 1, 1024), (1, 1, 16384), (8, 1, 1024), (32, 1, 4096), (128, 1, 1024))
"""Likewise, with one new token each."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A more preferred kernel that was passed over.

    Attributes:
        kernel: name of its row.
        reasons: every reason why it cannot take the problem.
    """

    kernel: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How the kernel is launched for one step.

    Attributes:
        block_m: query rows of a tile.
        block_n: keys of a tile.
        num_warps: warps of a thread block.
        num_stages: tiles of keys and values in flight.
        num_programs: thread blocks with work.
        num_kv_splits: parts into which a sequence's keys are split, None for a prefill.
        provenance: where the numbers come from.
        measured: whether they were chosen by timing on this architecture.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int
    num_kv_splits: int | None
    provenance: str
    measured: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step size: what runs, and the least it can cost in one layer.

    Attributes:
        num_seqs: sequences.
        query_tokens: new tokens of each.
        context: tokens of each, the new ones included.
        launch: None where the kernel has no launch of its own, as PyTorch's.
        bytes_moved: to and from main memory, at least.
        flops: of the two matrix products.
        flops_per_byte: arithmetic intensity.
        roofline_us: microseconds on this processor, at least; None where its peaks are not known.
        bound: "memory" or "compute", whichever sets that time.
    """

    num_seqs: int
    query_tokens: int
    context: int
    launch: LaunchPlan | None
    bytes_moved: int
    flops: int
    flops_per_byte: float
    roofline_us: float | None
    bound: str | None


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The kernel of one phase, for one kind of layer.

    Attributes:
        phase: "prefill" or "decode".
        sliding_window: tokens that these layers attend to; None for all.
        kernel: name of the chosen row.
        why: one sentence.
        refused: rows that were preferred and cannot take the problem.
        steps: step sizes, as examples.
    """

    phase: str
    sliding_window: int | None
    kernel: str
    why: str
    refused: tuple[RefusedRow, ...]
    steps: tuple[StepPlan, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The attention plan of a model on a processor.

    Attributes:
        arch: the processor, by its name in the catalogue or the driver's.
        arch_name: the vendor's name.
        sm: compute capability as major * 10 + minor; 0 for a CPU.
        num_sms: streaming multiprocessors; cores of a CPU.
        shared_memory_bytes: most that a thread block may use; 0 for a CPU.
        memory_bandwidth_gbs: peak, 10^9 bytes per second; 0 if not known.
        peak_tflops: of matrix products in this dtype, 10^12 operations per second; 0 if not known.
        dtype: of queries and output.
        weight_dtype: of the layers' matrices.
        kv_dtype: of the cache.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: elements.
        block_size: tokens of a cache block; None for packed keys and values.
        one_sequence: how a decode step of one sequence is computed.
        phases: what runs.
    """

    arch: str
    arch_name: str
    sm: int
    num_sms: int
    shared_memory_bytes: int
    memory_bandwidth_gbs: int
    peak_tflops: float
    dtype: str
    weight_dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None
    one_sequence: str
    phases: tuple[PhasePlan, ...]


def explain(
    problems: Sequence[AttentionProblem],
    arch: GPUArch,
    max_context: int,
    registry: Sequence[KernelSpec] = REGISTRY,
    weight_dtype: str | None = None,
    one_sequence: str = "layer by layer",
) -> Explanation:
    """Plan the attention of one model.

    Args:
        problems: of its phases and kinds of layer; they differ in phase and window only.
        arch: from `detect()` or `kernels.arch.CATALOGUE`.
        max_context: longest sequence of the model, tokens; longer examples are cut to it.
        registry: rows, most preferred first.
        weight_dtype: of the layers' matrices where they are quantised, to be told.
        one_sequence: how a decode step of one sequence is computed, likewise.

    Raises:
        NoKernelError: no row accepts one of the problems; lists every reason.
    """
    shape = problems[0]
    return Explanation(
        arch=arch.key,
        arch_name=arch.name,
        sm=arch.sm,
        num_sms=arch.num_sms,
        shared_memory_bytes=arch.shared_memory_bytes,
        memory_bandwidth_gbs=arch.memory_bandwidth_gbs,
        peak_tflops=arch.peak_tflops(shape.dtype),
        dtype=shape.dtype,
        weight_dtype=weight_dtype or shape.dtype,
        kv_dtype=shape.cache_dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        one_sequence=one_sequence,
        phases=tuple(_explain_phase(problem, arch, max_context, registry) for problem in problems),
    )


def _explain_phase(
    problem: AttentionProblem, arch: GPUArch, max_context: int, registry: Sequence[KernelSpec]
) -> PhasePlan:
    selection = select(problem, arch, registry, tuned_launches)
    examples = PREFILL_STEPS if problem.phase is Phase.PREFILL else DECODE_STEPS
    cut = ((b, min(new, max_context), min(length, max_context)) for b, new, length in examples)
    return PhasePlan(
        phase=problem.phase.value,
        sliding_window=problem.sliding_window,
        kernel=selection.spec.name,
        why=selection.why,
        refused=tuple(RefusedRow(*refusal) for refusal in selection.refusals),
        steps=tuple(_explain_step(problem, selection, *step) for step in dict.fromkeys(cut)),
    )


def _explain_step(
    problem: AttentionProblem, selection: Selection, num_seqs: int, query_tokens: int, context: int
) -> StepPlan:
    work = attention_work(problem, num_seqs, query_tokens, context)
    multiplied = "float8_e4m3fn" if selection.spec.fp8 else problem.dtype
    best = roofline(work, multiplied, selection.arch)
    return StepPlan(
        num_seqs=num_seqs,
        query_tokens=query_tokens,
        context=context,
        launch=_explain_launch(problem, selection, num_seqs, query_tokens, context),
        bytes_moved=work.bytes_moved,
        flops=work.flops,
        flops_per_byte=round(work.intensity, 2),
        roofline_us=None if best is None else round(best.seconds * 1e6, 3),
        bound=None if best is None else best.bound,
    )


def _explain_launch(
    problem: AttentionProblem, selection: Selection, num_seqs: int, query_tokens: int, context: int
) -> LaunchPlan | None:
    if not selection.launches:
        return None
    tuned = selection.tuned_for(context, num_seqs)
    launch, splits = tuned.launch, None
    if problem.phase is Phase.DECODE:
        splits = _splits_per_sequence(problem, launch, selection.arch, num_seqs, context)
    row_tiles = -(-query_tokens * problem.group_size // launch.block_m)
    programs = num_seqs * (splits or 1) * row_tiles * problem.num_kv_heads
    if selection.spec.persistent:
        programs = min(programs, selection.arch.num_sms)
    return LaunchPlan(
        block_m=launch.block_m,
        block_n=launch.block_n,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        num_programs=programs,
        num_kv_splits=splits,
        provenance=tuned.provenance,
        measured=tuned.measured,
    )


def _splits_per_sequence(
    problem: AttentionProblem, launch: LaunchConfig, arch: GPUArch, num_seqs: int, context: int
) -> int:
    """As the decode kernels do it on the device, for sequences of one length."""
    rows = problem.max_query_tokens * problem.group_size
    programs_per_split = problem.num_kv_heads * -(-rows // launch.block_m)
    wanted = splits_wanted(arch.num_sms, launch.programs_per_sm, programs_per_split)
    fixed = BATCH_INVARIANT_SPLIT_TOKENS // launch.block_n if problem.batch_invariant else 0
    window = problem.sliding_window
    first = 0 if window is None else max(0, context - problem.max_query_tokens - window + 1)
    splits = plan_splits([(first, context)] * num_seqs, launch.block_n, wanted, fixed)
    return len(splits) // num_seqs
