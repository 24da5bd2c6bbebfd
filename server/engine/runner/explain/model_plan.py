"""Builds the attention plan of a model on a processor from the choices of `kernels.select`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels import select
from kernels.cpu.library import instructions
from model.device.kv_cache import bytes_per_token
from model.network.cpu_steps import CACHE_DTYPE as CPU_CACHE_DTYPE
from model.network.single_launch import ROW_COUNTS, has_run
from server.engine.core.plan_report import (
    DeterminismPlan,
    LaunchPlan,
    MemoryPlan,
    PhasePlan,
    PlanReport,
    RefusedRow,
)
from server.engine.core.start_checks import StartupError

if TYPE_CHECKING:
    from kernels import AttentionProblem, GPUArch
    from kernels.weight_format import WeightFormat
    from model.network.decoder import DecoderLM


def explain_model(
    model: DecoderLM,
    block_size: int,
    arch: GPUArch,
    kv_dtype: str | None = None,
    cpu_quantization: WeightFormat | None = None,
    *,
    deterministic: bool = False,
) -> PlanReport:
    """Plan the attention of every phase and kind of layer, and how one sequence is decoded.

    Args:
        model: on any device, including "meta"; its weights are not read.
        block_size: tokens in a block of the KV cache.
        arch: the processor; it need not be present.
        kv_dtype: dtype of a quantized KV cache; None if the cache has the model's dtype.
        cpu_quantization: of the matrices if the C library computes the steps; None otherwise.
        deterministic: whether all requests are deterministic.

    Raises:
        NoKernelError: no kernel supports the model's attention on the processor; lists every reason.
        StartupError: not all requests can be deterministic; lists every reason.
    """
    in_c = cpu_quantization is not None
    invariant = deterministic and not in_c
    if invariant:
        check_deterministic(model, block_size, arch, kv_dtype)
    problems = model.attention.problems(block_size, kv_dtype, deterministic=invariant)
    shape = problems[0]
    return PlanReport(
        arch=arch.key,
        arch_name=arch.name,
        sm=arch.sm,
        num_sms=arch.num_sms,
        shared_memory_bytes=arch.shared_memory_bytes,
        memory_bandwidth_gbs=arch.memory_bandwidth_gbs,
        peak_tflops=arch.peak_tflops(shape.dtype),
        dtype=shape.dtype,
        weight_dtype=(cpu_quantization or model.weight_format).name,
        kv_dtype=CPU_CACHE_DTYPE if in_c else shape.cache_dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        memory=_plan_memory(model, CPU_CACHE_DTYPE if in_c else shape.cache_dtype, in_c=in_c),
        one_sequence="in one launch" if in_c else _plan_launches(model, arch, invariant=invariant),
        phases=[
            _plan_cpu_phase(problem) if in_c else _plan_phase(problem, arch) for problem in problems
        ],
        deterministic=(
            DeterminismPlan(
                requests="all", why="the C library computes equal bits in every step, at no cost"
            )
            if in_c
            else _plan_determinism(model, block_size, arch, kv_dtype, always=deterministic)
        ),
        num_ranks=model.num_ranks,
    )


def check_deterministic(
    model: DecoderLM, block_size: int, arch: GPUArch, kv_dtype: str | None = None
) -> None:
    """Check that all requests can be deterministic; arguments as for `explain_model`.

    Raises:
        StartupError: they cannot; lists every reason.
    """
    if reasons := model.deterministic_unsupported(arch, block_size, kv_dtype):
        raise StartupError(f"--deterministic is not supported here: {'; '.join(reasons)}")


def _plan_launches(model: DecoderLM, arch: GPUArch, *, invariant: bool) -> str:
    """Return how a decode step of one sequence is computed; if in one launch, also a step of a few."""
    reasons = ("deterministic",) if invariant else model.single_launch_unsupported(arch)
    if reasons:
        return f"layer by layer: {'; '.join(reasons)}"
    counts: dict[str, list[str]] = {}
    for rows in ROW_COUNTS:
        reasons = model.single_launch_unsupported(arch, rows)
        way = f"layer by layer: {'; '.join(reasons)}" if reasons else "in one launch"
        counts.setdefault(way, []).append(str(rows))
    few = (f"{', '.join(rows)} sequences {way}" for way, rows in counts.items())
    note = "" if has_run(arch) else ", which no GPU of this architecture has run"
    return "; ".join((f"in one launch{note}", *few))


def _plan_memory(model: DecoderLM, kv_dtype: str, *, in_c: bool) -> MemoryPlan:
    """Return the memory of the weights and of a token, in a cache of dtype `kv_dtype`."""
    layers = model.network.layers
    mixer = layers[0].mixer
    return MemoryPlan(
        weight_bytes=None if in_c else model.weight_bytes,
        kv_bytes_per_token=bytes_per_token(
            len(layers), mixer.num_kv_heads, mixer.head_dim, getattr(torch, kv_dtype)
        ),
        max_context=model.config.max_context,
    )


def _plan_determinism(
    model: DecoderLM, block_size: int, arch: GPUArch, kv_dtype: str | None, *, always: bool
) -> DeterminismPlan:
    """Plan which requests are deterministic where PyTorch or a GPU computes the steps."""
    reasons = model.deterministic_unsupported(arch, block_size, kv_dtype)
    if reasons:
        return DeterminismPlan(requests="none", why="; ".join(reasons))
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
        refused=[
            RefusedRow(kernel=refusal.kernel, reasons=list(refusal.reasons))
            for refusal in selection.refusals
        ],
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
