"""Writes an explanation of the attention plan for a terminal. Knows only `kernels.explain.plan`'s data."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.explain.plan import Explanation, PhasePlan, StepPlan

WIDTH = 120
_HEADER = (
    "phase", "seqs", "new", "context", "kernel", "tile", "warps", "stages", "splits",
    "MB", "GFLOP", "FLOP/B", "us", "bound",
)  # fmt: skip
_LEFT = {"phase", "kernel", "bound"}
_UNKNOWN = "-"
_LEGEND = (
    "MB, GFLOP and us are the least that one layer needs; us at the peaks of memory and arithmetic"
)


def render(explanation: Explanation, model: str) -> str:
    """Write a table of steps, then the reasons.

    Args:
        explanation: from `kernels.explain.plan.explain`.
        model: what the operator calls the model.

    Returns:
        Lines of at most `WIDTH` characters, without a newline at the end.
    """
    rows = [_cells(phase, step) for phase in explanation.phases for step in phase.steps]
    lines = [_processor(explanation), _shape(explanation, model), _LEGEND, "", *_table(rows), ""]
    for phase in explanation.phases:
        lines += _reasons(phase)
    one = f"one sequence is decoded {explanation.one_sequence}"
    return "\n".join([*lines, *textwrap.wrap(one, WIDTH, subsequent_indent=" " * 8)])


def _processor(plan: Explanation) -> str:
    if not plan.sm:
        return f"{plan.arch_name}: peaks not known"
    text = f"{plan.arch_name} (sm_{plan.sm}): {plan.num_sms} SMs"
    text += f", {plan.shared_memory_bytes // 1024} KiB shared memory a block"
    if plan.memory_bandwidth_gbs and plan.peak_tflops:
        text += f", {plan.memory_bandwidth_gbs} GB/s, {plan.peak_tflops:g} TFLOP/s in {plan.dtype}"
    else:
        text += f", peaks in {plan.dtype} not known"
    return text


def _shape(plan: Explanation, model: str) -> str:
    blocks = "" if plan.block_size is None else f", blocks of {plan.block_size} tokens"
    weights = "" if plan.weight_dtype == plan.dtype else f", weights in {plan.weight_dtype}"
    cache = "" if plan.kv_dtype == plan.dtype else f", cache in {plan.kv_dtype}"
    return (
        f"{model} in {plan.dtype}{weights}{cache}: {plan.num_heads} query heads, {plan.num_kv_heads} key-value heads, "
        f"head dim {plan.head_dim}{blocks}"
    )


def _cells(phase: PhasePlan, step: StepPlan) -> tuple[str, ...]:
    launch = step.launch
    name = phase.phase if phase.sliding_window is None else f"{phase.phase} w{phase.sliding_window}"
    launched = [_UNKNOWN] * 4
    if launch is not None:
        splits = _UNKNOWN if launch.num_kv_splits is None else str(launch.num_kv_splits)
        tile = f"{launch.block_m}x{launch.block_n}"
        launched = [tile, str(launch.num_warps), str(launch.num_stages), splits]
    return (
        name,
        str(step.num_seqs),
        str(step.query_tokens),
        str(step.context),
        phase.kernel,
        *launched,
        _three_digits(step.bytes_moved / 1e6),
        _three_digits(step.flops / 1e9),
        _three_digits(step.flops_per_byte),
        _UNKNOWN if step.roofline_us is None else _three_digits(step.roofline_us),
        step.bound or _UNKNOWN,
    )


def _three_digits(value: float) -> str:
    """At least three significant digits, never an exponent."""
    decimals = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    lines = [_HEADER, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    for line in lines:
        cells = (
            cell.ljust(width) if title in _LEFT else cell.rjust(width)
            for cell, width, title in zip(line, widths, _HEADER, strict=True)
        )
        yield "  ".join(cells).rstrip()


def _reasons(phase: PhasePlan) -> Iterator[str]:
    yield from _wrapped("why", phase.why)
    for row in phase.refused:
        yield from _wrapped("not", f"{row.kernel}: {'; '.join(row.reasons)}")
    launches = [step.launch for step in phase.steps if step.launch is not None]
    for provenance, measured in dict.fromkeys((row.provenance, row.measured) for row in launches):
        yield from _wrapped("launch", provenance if measured else f"not measured; {provenance}")


def _wrapped(word: str, text: str) -> list[str]:
    first, rest = f"{word:<7} ", " " * 8
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest)
