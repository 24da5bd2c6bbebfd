"""Builds the attention plan of a model on a processor from the choices of `kernels.select`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import select
from kernels.cpu.library import instructions
from model.network.cpu_steps import CACHE_DTYPE as CPU_CACHE_DTYPE
from server.engine.core.plan_report import LaunchPlan, PhasePlan, PlanReport, RefusedRow

if TYPE_CHECKING:
    from kernels import AttentionProblem, GPUArch
    from model.network.decoder import DecoderLM


def explain_model(
    model: DecoderLM,
    block_size: int,
    arch: GPUArch,
    kv_dtype: str | None = None,
    cpu_quantization: str | None = None,
) -> PlanReport:
    """Plan the attention of every phase and kind of layer, and how one sequence is decoded.

    Args:
        model: on any device, including "meta"; its weights are not read.
        block_size: tokens in a block of the KV cache.
        arch: the processor; it need not be present.
        kv_dtype: dtype of a quantized KV cache; None if the cache has the model's dtype.
        cpu_quantization: "int8" or "int4" if the C library computes the steps; None otherwise.

    Raises:
        NoKernelError: no kernel supports the model's attention on the processor; lists every reason.
    """
    problems = model.attention_problems(block_size, kv_dtype)
    in_c = cpu_quantization is not None
    shape, weight_dtype, reasons = (
        problems[0],
        model.weight_dtype,
        model.single_launch_unsupported(arch),
    )
    return PlanReport(
        arch=arch.key,
        arch_name=arch.name,
        sm=arch.sm,
        num_sms=arch.num_sms,
        shared_memory_bytes=arch.shared_memory_bytes,
        memory_bandwidth_gbs=arch.memory_bandwidth_gbs,
        peak_tflops=arch.peak_tflops(shape.dtype),
        dtype=shape.dtype,
        weight_dtype=(
            str(weight_dtype or shape.dtype).removeprefix("torch.")
            if cpu_quantization is None
            else cpu_quantization
        ),
        kv_dtype=CPU_CACHE_DTYPE if in_c else shape.cache_dtype,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        one_sequence=(
            f"layer by layer: {'; '.join(reasons)}" if reasons and not in_c else "in one launch"
        ),
        phases=[
            _plan_cpu_phase(problem) if in_c else _plan_phase(problem, arch) for problem in problems
        ],
    )


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
        kernel=selection.spec.name,
        flash_attention=selection.spec.flash_attention,
        tested=arch.is_tested,
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
