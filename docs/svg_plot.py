"""Draws lines over a logarithmic axis as an SVG file; its text is the same for the same numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 46, 56
_TICKS = 6


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        points: (x, y), x ascending and positive.
        color: a CSS color.
        dashed: whether it is dashed.
    """

    points: Sequence[tuple[float, float]]
    color: str
    dashed: bool = False


def line_plot(
    title: str,
    lines: Mapping[str, Line],
    *,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    x_text: Callable[[float], str] = "{:g}".format,
) -> str:
    """Return an SVG image with a white ground, so that it is legible on dark pages too.

    Args:
        title: above the plot.
        lines: by name; each name stands at the end of its line.
        x_label: below the x axis, which is logarithmic.
        y_label: above the y axis.
        log_y: whether y is logarithmic too.
        x_text: text of a value of x.
    """
    xs = sorted({x for line in lines.values() for x, _ in line.points})
    ys = [y for line in lines.values() for _, y in line.points]
    marks = _decades(min(ys), max(ys)) if log_y else _steps(max(ys))

    def place_x(x: float) -> float:
        share = math.log(x / xs[0]) / math.log(xs[-1] / xs[0]) if xs[-1] > xs[0] else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def place_y(y: float) -> float:
        low, high = marks[0], marks[-1]
        share = math.log(y / low) / math.log(high / low) if log_y else (y - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="12" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        _text(_LEFT, 24, title, size=15),
    ]
    for mark in marks:
        y = place_y(mark)
        parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y))
        parts.append(_text(_LEFT - 8, y + 4, f"{mark:,g}", anchor="end"))
    for x in xs:
        parts.append(_rule(place_x(x), _TOP, place_x(x), _HEIGHT - _BOTTOM))
        parts.append(_text(place_x(x), _HEIGHT - _BOTTOM + 18, x_text(x), anchor="middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(_text(middle, _HEIGHT - 14, x_label, anchor="middle"))
    parts.append(_text(_LEFT - 60, _TOP - 8, y_label))
    ends = _apart([(place_y(line.points[-1][1]), name) for name, line in lines.items()])
    for name, line in lines.items():
        places = [(place_x(x), place_y(y)) for x, y in line.points]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="2"{dash}/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.color}"/>' for x, y in places
        ]
        parts.append(_text(places[-1][0] + 8, ends[name] + 4, name, color=line.color))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _steps(highest: float) -> list[float]:
    """Return round values from 0 to at least the highest."""
    rough = highest / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(it * power for it in (1, 2, 5, 10) if it * power >= rough)
    return [step * number for number in range(math.ceil(highest / step) + 1)]


def _decades(lowest: float, highest: float) -> list[float]:
    """Return powers of ten around two positive values."""
    first = math.floor(math.log10(lowest))
    last = max(first + 1, math.ceil(math.log10(highest)))
    return [10.0**power for power in range(first, last + 1)]


def _apart(ends: list[tuple[float, str]], gap: float = 14) -> dict[str, float]:
    """Return heights of labels that do not overlap, near those of the ends of their lines."""
    placed: dict[str, float] = {}
    before = -math.inf
    for height, name in sorted(ends):
        before = placed[name] = max(height, before + gap)
    return placed


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, color: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">'
        f"{escape(text)}</text>"
    )
