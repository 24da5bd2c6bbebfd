"""`tessera plan`: shows which kernels run for a model on a processor, and why. The processor may be absent.

Imports PyTorch, so `server.cli.command_groups` imports it only for this command.
"""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

import msgspec

from kernels import GPUArch, KernelError
from model.errors import ModelError
from server.cli.output import write_result
from server.cli.plan.planned_model import resolve_model
from server.cli.plan.processor import NoDeviceError, find_arch
from server.engine.core.memory.kv_demand import GIB
from server.engine.core.start_checks import StartupError
from server.engine.runner.explain.model_plan import explain_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from server.cli.settings import Settings
    from server.engine.core.plan_report import (
        LaunchPlan,
        MemoryPlan,
        PhasePlan,
        PlanReport,
        RefusedRow,
        StepPlan,
    )

WIDTH = 120
"""Width of the printed plan in characters."""
_STEPS_WIDTH = 100
"""Width of the part about steps."""
_KERNEL_WIDTH = 26


def plan(options: argparse.Namespace, settings: Settings, folder: Path) -> None:
    """Print the plan; exit with status 1 if the model has none.

    Args:
        options: has `arch`, a key of the catalogue or None, and `json`.
        settings: of the planned service.
        folder: of the model's configuration.
    """
    try:
        report = explain_settings(
            settings, folder, find_arch(options.arch, settings.device, "--arch")
        )
    except (ModelError, KernelError, NoDeviceError, StartupError) as error:
        print(f"tessera plan: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    else:
        text = render(report, settings.model)
    write_result(text)


def explain_settings(settings: Settings, folder: Path, arch: GPUArch) -> PlanReport:
    """Explain how a processor computes a service with these settings.

    Raises:
        ModelError: the model is not supported, or the processor does not support the quantization.
        NoKernelError: no kernel supports an operation; lists every reason.
        StartupError: not all requests can be deterministic; lists every reason.
    """
    model, _, kv_dtype = resolve_model(settings, folder, arch)
    return explain_model(
        model, settings.block_size, arch, kv_dtype, deterministic=settings.deterministic
    )


def render(report: PlanReport, model: str) -> str:
    """Format a plan for a terminal, without a newline at the end. Lines of reasons have at most `WIDTH` characters."""
    lines = [_processor(report), *_wrapped("", _shape(report, model))]
    lines += _wrapped("", _memory(report.memory))
    for phase in report.phases:
        lines += ["", *_phase(phase, report)]
    lines += ["", *_steps(report)]
    lines += ["", *_wrapped("", f"one sequence is decoded {report.one_sequence}")]
    plan = report.deterministic
    return "\n".join(
        [*lines, *_wrapped("", f"deterministic requests: {plan.requests}; {plan.why}")]
    )


def _processor(report: PlanReport) -> str:
    if report.arch == "cpu":
        return f"{report.arch_name}: peaks not known"
    text = f"{report.arch_name} (sm_{report.sm}): {report.num_sms} SMs"
    text += f", {report.shared_memory_bytes // 1024} KiB shared memory per block"
    if report.memory_bandwidth_gbs and report.peak_tflops:
        bandwidth, peak = report.memory_bandwidth_gbs, report.peak_tflops
        return f"{text}, {bandwidth} GB/s, {peak:g} TFLOP/s in {report.dtype}"
    return f"{text}, peaks in {report.dtype} not known"


def _shape(report: PlanReport, model: str) -> str:
    blocks = "" if report.block_size is None else f", blocks of {report.block_size} tokens"
    weights = "" if report.weight_dtype == report.dtype else f", weights in {report.weight_dtype}"
    cache = "" if report.kv_dtype == report.dtype else f", cache in {report.kv_dtype}"
    ranks = "" if report.num_ranks == 1 else f"; this is one of {report.num_ranks} ranks"
    return (
        f"{model} in {report.dtype}{weights}{cache}: {report.num_heads} query heads, "
        f"{report.num_kv_heads} key-value heads, head dim {report.head_dim}{blocks}{ranks}"
    )


def _memory(memory: MemoryPlan) -> str:
    weights = (
        "" if memory.weight_bytes is None else f"weights {memory.weight_bytes / GIB:.2f} GiB; "
    )
    state = memory.state_bytes_per_sequence
    sequence = (memory.kv_bytes_per_token * memory.max_context + state) / GIB
    states = f" and {state / 2**10:g} KiB a sequence" if state else ""
    if memory.state_snapshots:
        states += f" and a snapshot ({memory.state_snapshots} of them)"
    return (
        f"memory: {weights}KV cache {memory.kv_bytes_per_token / 2**10:g} KiB a token{states}, {sequence:.2f} GiB "
        f"for one sequence of {memory.max_context} tokens"
    )


def _phase(phase: PhasePlan, report: PlanReport) -> Iterator[str]:
    window = "" if phase.sliding_window is None else f", window {phase.sliding_window}"
    softcap = "" if phase.softcap is None else f", softcap {phase.softcap:g}"
    follows = phase.flash_attention
    kind = "PyTorch" if follows is None else f"FlashAttention-{follows} style"
    yield f"{phase.phase}{window}{softcap}: {phase.kernel} ({kind})"
    if not phase.tested:
        yield from _wrapped("note", report.untested)
    yield from _wrapped("why", phase.why)
    for row in phase.refused:
        yield from _wrapped("not", f"{row.kernel}: {'; '.join(row.reasons)}")
    for launch in phase.launches:
        yield from _wrapped("launch", _launch(launch))


def _launch(launch: LaunchPlan) -> str:
    steps = f", from {launch.min_num_seqs} sequences on" if launch.min_num_seqs else ""
    if launch.max_seqlen_k is not None:
        steps += f", up to {launch.max_seqlen_k} tokens"
    return (
        f"{launch.block_m}x{launch.block_n}, {launch.num_warps} warps, {launch.num_stages} stages{steps}: "
        f"{'' if launch.measured else 'not measured; '}{launch.provenance}"
    )


def _steps(report: PlanReport) -> Iterator[str]:
    """Yield the executor and the kernels of each kind of step, then what was passed over and is not shown elsewhere."""
    alike: dict[tuple[object, ...], list[StepPlan]] = {}
    reasons: dict[str, dict[str, None]] = {}
    for step in report.steps:
        kernels = ((it.operation, it.kernel) for it in step.operations)
        alike.setdefault((step.executor, not step.decode_rows, *kernels), []).append(step)
        for refused in (step.refused, *(it.refused for it in step.operations)):
            for row in refused:
                reasons.setdefault(row.kernel, {}).update(dict.fromkeys(row.reasons))
    for first, *more in alike.values():
        rows = ", ".join(str(step.decode_rows) for step in (first, *more))
        name = f"decode of {rows} sequences" if more else first.step
        yield f"{name} by {first.executor}{_passed(first.refused)}"
        operations: dict[tuple[str, str], list[str]] = {}
        for it in first.operations:
            key = it.kernel, _passed(it.refused)
            operations.setdefault(key, []).append(it.operation)
        for (kernel, passed), names in operations.items():
            yield from _row(kernel, ", ".join(names) + passed)
    yield "reasons"
    shown = {row.kernel for phase in report.phases for row in phase.refused}
    for kernel, texts in reasons.items():
        if kernel not in shown:
            yield from _row(kernel, "; ".join(texts))


def _passed(refused: list[RefusedRow]) -> str:
    return f"; not {', '.join(row.kernel for row in refused)}" if refused else ""


def _row(kernel: str, text: str) -> list[str]:
    first = f"  {kernel} ".ljust(_KERNEL_WIDTH)
    return textwrap.wrap(
        text, _STEPS_WIDTH, initial_indent=first, subsequent_indent=" " * _KERNEL_WIDTH
    )


def _wrapped(word: str, text: str) -> list[str]:
    first = f"{word:<7} " if word else ""
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * 8)
