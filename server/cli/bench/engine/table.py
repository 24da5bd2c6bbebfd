"""Formats the results of `tessera bench engine` for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.cli.bench.engine.profile import GPUProfile, StepProfile

HEADER = f"{'metric':<14} {'sequences':>9} {'prompt':>9} {'value':>10} {'roofline':>9}"
_TOP_KERNELS = 15
_NAME_LENGTH = 60


def line(row: dict[str, Any]) -> str:
    """Format a row of the result for the columns of `HEADER`."""
    share = row["roofline"]
    return (
        f"{row['metric']:<14} {row['batch']:>9} {row.get('prompt_tokens', ''):>9} {row['value']:>10} "
        f"{'' if share is None else format(share, '.1%'):>9}"
    ).rstrip()


def render(profile: StepProfile) -> str:
    """Format a profile."""
    step = profile.step_us
    lines = [f"{profile.what}: {step:.1f} us"]
    lines += _table("host", [(name, us, "") for name, us in profile.phases_us.items()], step)
    if profile.gpu is not None:
        lines += _render_gpu(profile.gpu, step)
    if profile.least_us is None:
        lines.append("  no roofline: the processor's peaks are not known")
    else:
        lines.append(
            f"  roofline {profile.least_us:.1f} us, {profile.least_us / step:.1%} of it reached; "
            f"MBU {profile.memory_share:.1%}, MFU {profile.compute_share:.1%}"
        )
    return "\n".join(lines)


def _render_gpu(gpu: GPUProfile, step: float) -> list[str]:
    rest = step - gpu.busy_us - gpu.short_gaps_us
    rows = [
        ("busy", gpu.busy_us, f"{gpu.launches:.0f} kernels and copies"),
        ("short gaps", gpu.short_gaps_us, f"{gpu.short_gaps:.0f} x"),
        ("waits for the host", rest, ""),
    ]
    lines = _table("GPU", rows, step)
    top, others = gpu.kernels[:_TOP_KERNELS], gpu.kernels[_TOP_KERNELS:]
    rows = [(_short(k.name), k.added_us, f"{k.launches:g} x, {k.microseconds:.1f} us") for k in top]
    if others:
        rows.append((f"{len(others)} others", sum(k.added_us for k in others), ""))
    return lines + _table("kernel", rows, step)


def _table(title: str, rows: Sequence[tuple[str, float, str]], step_us: float) -> list[str]:
    return [
        f"  {title:<7} {name:<{_NAME_LENGTH}} {us:10.1f} us {us / step_us:6.1%}  {note}".rstrip()
        for name, us, note in rows
    ]


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."
