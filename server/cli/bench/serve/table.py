"""Formats the figures of a run for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from server.cli.bench.serve.metrics import PERCENTILES, Distribution, Summary

_BUSY_LIMIT = 0.8
_LAG_LIMIT_MS = 20.0


def render(summary: Summary, load: str, busy: Sequence[float]) -> str:
    """Format a run as a short table."""
    lines = [
        f"{load}: {summary.completed} requests in {summary.seconds:.2f} s, {summary.failed} failed",
        f"  output tok/s {summary.output_tokens_per_second:10.1f}    "
        f"total tok/s {summary.total_tokens_per_second:10.1f}    "
        f"requests/s {summary.requests_per_second:8.2f}"
        + ("" if summary.goodput is None else f"    goodput/s {summary.goodput:8.2f}"),
        "  ms              mean "
        + " ".join(f"{f'p{rank}':>9}" for rank in PERCENTILES)
        + "       max",
    ]
    named = (
        ("TTFT", summary.ttft_ms),
        ("TPOT", summary.tpot_ms),
        ("ITL", summary.itl_ms),
        ("end to end", summary.e2e_ms),
        ("sent late", summary.lag_ms),
    )
    lines += [_row(name, values) for name, values in named if values is not None]
    lines += [
        f"  {count} x {kind}: {summary.examples[kind]}" for kind, count in summary.errors.items()
    ]
    return "\n".join(lines + [f"  note: {note}" for note in _notes(summary, busy)])


def _row(name: str, values: Distribution) -> str:
    figures = [values.mean, *values.percentiles.values(), values.largest]
    return f"  {name:<10} " + " ".join(f"{figure:9.2f}" for figure in figures)


def _notes(summary: Summary, busy: Sequence[float]) -> list[str]:
    notes = []
    if summary.short:
        notes.append(f"{summary.short} answers are shorter than asked for")
    if summary.uncounted:
        notes.append(
            f"the server did not count the tokens of {summary.uncounted} answers; events are counted"
        )
    if summary.tokens_per_read > 1.05:
        notes.append(
            f"{summary.tokens_per_read:.1f} events came together on average, with gaps of 0 between them"
        )
    if max(busy, default=0.0) > _BUSY_LIMIT:
        notes.append(
            f"a client process was busy for {max(busy):.0%} of the time; give more --processes"
        )
    if summary.lag_ms is not None and summary.lag_ms.percentiles[99] > _LAG_LIMIT_MS:
        notes.append("requests were sent late; give more --processes")
    return notes
