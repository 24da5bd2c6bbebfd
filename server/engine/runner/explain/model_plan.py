"""Explains how a processor computes a model: executors, kernels, and the reasons of those that were passed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kernels import Selection, select
from kernels.cpu.library import instructions
from kernels.linear.select import LinearChoice
from kernels.selection import VectorProblem, select_vector
from kernels.step.single_launch import has_run
from model.executors.bound import deterministic_unsupported
from model.executors.columns import ADAPTER, Bucket
from model.executors.cpu_library import CACHE_DTYPE as CPU_CACHE_DTYPE
from model.executors.layers.executor import LAYERS
from model.executors.layers.layer_kernels import attention_kernels, layer_kernels
from model.executors.modules.executor import MODULES
from model.executors.single_launch import ROW_COUNTS, SINGLE_LAUNCH
from model.executors.table import choose_executor
from model.sampling.sampler import SAMPLERS
from server.engine.core.plan_report import (
    DeterminismPlan,
    LaunchPlan,
    MemoryPlan,
    OperationPlan,
    PhasePlan,
    PlanReport,
    RefusedRow,
    StepPlan,
)
from server.engine.core.start_checks import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kernels import AttentionProblem, GPUArch
    from kernels.selection import Refusal
    from model.decoder import DecoderLM
    from model.executors.layers.layer_kernels import AnyChoice

_DECODE_ROWS: Final = (1, *ROW_COUNTS, 64)
_KERNELS: Final = {LAYERS.name: layer_kernels, MODULES.name: attention_kernels}
"""The operations of the executors that launch more than one kernel."""
_PROMPT_TOKENS: Final = 1024
"""Steps that are explained: those that may be one launch, one of many sequences, and one of a chunk of a prompt."""


def explain_model(
    model: DecoderLM,
    block_size: int,
    arch: GPUArch,
    kv_dtype: str | None = None,
    *,
    deterministic: bool = False,
) -> PlanReport:
    """Explain how steps of each kind are computed, and the attention of every phase and kind of layer.

    Args:
        model: on any device, including "meta"; its weights are not read.
        block_size: tokens in a block of the KV cache.
        arch: the processor; it need not be present.
        kv_dtype: dtype of a quantized KV cache; None if the cache has the model's dtype.
        deterministic: whether all requests are deterministic.

    Raises:
        NoKernelError: no kernel supports an operation on the processor; lists every reason.
        StartupError: not all requests can be deterministic; lists every reason.
    """
    in_c = model.is_in_library
    invariant = deterministic and not in_c
    if invariant:
        check_deterministic(model, block_size, arch, kv_dtype)
    problems = model.attention.problems(block_size, kv_dtype, deterministic=invariant)
    shape = problems[0]
    steps = [
        _plan_step(model, bucket, arch, block_size, kv_dtype)
        for bucket in _buckets(block_size, deterministic=invariant)
    ]
    return PlanReport(
        arch=arch.key,
        arch_name=arch.name,
        sm=arch.sm,
        num_sms=arch.num_sms,
        shared_memory_bytes=arch.shared_memory_bytes,
        memory_bandwidth_gbs=arch.memory_bandwidth_gbs,
        peak_tflops=arch.peak_tflops(shape.dtype),
        dtype=shape.dtype,
        weight_dtype=model.weight_format.name,
        kv_dtype=CPU_CACHE_DTYPE if in_c else shape.cache_dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        memory=_plan_memory(model, CPU_CACHE_DTYPE if in_c else shape.cache_dtype, in_c=in_c),
        one_sequence=_describe_few(steps, arch),
        phases=[
            _plan_cpu_phase(problem) if in_c else _plan_phase(problem, arch) for problem in problems
        ],
        steps=steps,
        deterministic=(
            DeterminismPlan(
                requests="all", why="the C library computes equal bits in every step, at no cost"
            )
            if in_c
            else _plan_determinism(model, block_size, arch, kv_dtype, always=deterministic)
        ),
        num_ranks=model.num_ranks,
        adapters=None
        if model.adapters is None
        else _plan_step(
            model,
            msgspec.structs.replace(
                next(_buckets(block_size, deterministic=invariant)), extra_columns=(ADAPTER,)
            ),
            arch,
            block_size,
            kv_dtype,
        ),
    )


def check_deterministic(
    model: DecoderLM, block_size: int, arch: GPUArch, kv_dtype: str | None = None
) -> None:
    """Check that all requests can be deterministic; arguments as for `explain_model`.

    Raises:
        StartupError: they cannot; lists every reason.
    """
    if reasons := deterministic_unsupported(model, arch, block_size, kv_dtype):
        raise StartupError(f"--deterministic is not supported here: {'; '.join(reasons)}")


def _buckets(block_size: int, *, deterministic: bool) -> Iterator[Bucket]:
    """Yield a step of each kind."""
    for rows, tokens in (*((rows, 0) for rows in _DECODE_ROWS), (0, _PROMPT_TOKENS)):
        yield Bucket(
            rows=rows,
            prompt_tokens=tokens,
            prompt_seqs=min(tokens, 1),
            columns=-(-_PROMPT_TOKENS // block_size),
            num_logits=max(rows, 1),
            deterministic=deterministic,
        )


def _plan_step(
    model: DecoderLM,
    bucket: Bucket,
    arch: GPUArch,
    block_size: int,
    kv_dtype: str | None,
) -> StepPlan:
    rows, tokens = bucket.rows, bucket.prompt_tokens
    name = f"decode of {rows} sequence{'s' * (rows > 1)}" if rows else f"prompt of {tokens} tokens"
    if ADAPTER in bucket.extra_columns:
        name += " with an adapter"
    problem = model.executors.problem(arch, kv_dtype)
    chosen = choose_executor(problem, bucket, f"a {name}")
    note = chosen.spec.describe(problem)
    operations: list[tuple[str, AnyChoice]] = []
    if (kernels := _KERNELS.get(chosen.spec.name)) is not None:
        operations += kernels(model, bucket, arch, block_size, kv_dtype)
    operations.append(("sampling", select_vector(SAMPLERS, VectorProblem("float32"), arch)))
    return StepPlan(
        step=name,
        decode_rows=rows,
        prompt_tokens=tokens,
        executor=chosen.spec.name,
        why=f"{chosen.why}; {note}" if note else chosen.why,
        refused=_refused(chosen.refusals),
        operations=[
            OperationPlan(
                operation=operation,
                kernel=choice.spec.name,
                why=choice.why,
                measured=_is_measured(choice),
                refused=_refused(choice.refusals),
            )
            for operation, choice in operations
        ],
    )


def _is_measured(choice: AnyChoice) -> bool:
    if isinstance(choice, LinearChoice):
        return choice.measured
    return isinstance(choice, Selection) and any(it.measured for it in choice.launches)


def _refused(refusals: Iterable[Refusal]) -> list[RefusedRow]:
    return [RefusedRow(kernel=it.kernel, reasons=list(it.reasons)) for it in refusals]


def _describe_few(steps: Sequence[StepPlan], arch: GPUArch) -> str:
    """Describe how a decode step of one sequence is computed; if in a single launch, also steps of a few."""
    first, *few = (step for step in steps if step.decode_rows in (1, *ROW_COUNTS))
    if first.executor != SINGLE_LAUNCH.name:
        return _way(first)
    counts: dict[str, list[str]] = {}
    for step in few:
        counts.setdefault(_way(step), []).append(str(step.decode_rows))
    note = "" if has_run(arch) else ", which no GPU of this architecture has run"
    ways = (f"{', '.join(rows)} sequences {way}" for way, rows in counts.items())
    return "; ".join((f"in one launch{note}", *ways))


def _way(step: StepPlan) -> str:
    if step.executor == MODULES.name:
        return "by modules of transformers, the slow path"
    if step.executor != LAYERS.name:
        return "in one launch"
    (reasons,) = (row.reasons for row in step.refused if row.kernel == SINGLE_LAUNCH.name)
    return f"layer by layer: {'; '.join(reasons)}"


def _plan_memory(model: DecoderLM, kv_dtype: str, *, in_c: bool) -> MemoryPlan:
    """Return the memory of the weights, of a token and of a sequence, in a cache of dtype `kv_dtype`."""
    state = model.network.state(kv_dtype)
    return MemoryPlan(
        weight_bytes=None if in_c else model.weight_bytes,
        kv_bytes_per_token=state.token_bytes,
        max_context=model.config.max_context,
        state_bytes_per_sequence=state.slot_bytes,
    )


def _plan_determinism(
    model: DecoderLM, block_size: int, arch: GPUArch, kv_dtype: str | None, *, always: bool
) -> DeterminismPlan:
    """Plan which requests are deterministic where PyTorch or a GPU computes the steps."""
    reasons = deterministic_unsupported(model, arch, block_size, kv_dtype)
    if reasons:
        return DeterminismPlan(requests="none", why="; ".join(reasons))
    if arch.is_cpu:
        why = "the C library computes equal bits of a row beside any others, at no cost"
        return DeterminismPlan(requests="all", why=why)
    problems = model.attention.problems(block_size, kv_dtype, deterministic=True)
    names = dict.fromkeys(select(problem, arch).spec.name for problem in problems)
    why = f"batch-invariant products, and attention by {', '.join(names)}, in steps with such a request"
    if always:
        return DeterminismPlan(requests="all", why=f"--deterministic; {why}")
    return DeterminismPlan(requests="on request", why=why)


def _plan_cpu_phase(problem: AttentionProblem) -> PhasePlan:
    """Plan a phase that the C library computes as part of its steps."""
    return PhasePlan(
        phase=problem.phase.value,
        sliding_window=problem.sliding_window,
        kernel="cpu_step",
        flash_attention=2,
        tested=True,
        why=f"one call of the C library computes a step, with {instructions()}",
        refused=[],
        launches=[],
    )


def _plan_phase(problem: AttentionProblem, arch: GPUArch) -> PhasePlan:
    selection = select(problem, arch)
    return PhasePlan(
        phase=problem.phase.value,
        sliding_window=problem.sliding_window,
        softcap=problem.softcap,
        kernel=selection.spec.name,
        flash_attention=selection.spec.flash_attention,
        tested=arch.is_tested and selection.spec.has_run,
        why=selection.why,
        refused=_refused(selection.refusals),
        launches=[
            LaunchPlan(
                min_num_seqs=tuned.min_num_seqs,
                max_seqlen_k=tuned.max_seqlen_k,
                block_m=tuned.launch.block_m,
                block_n=tuned.launch.block_n,
                num_warps=tuned.launch.num_warps,
                num_stages=tuned.launch.num_stages,
                programs_per_sm=tuned.launch.programs_per_sm,
                provenance=tuned.provenance,
                measured=tuned.measured,
            )
            for tuned in selection.launches
        ],
    )
