"""Draws docs/dashboard.svg, the dashboard of docs/operations.md: `python -m docs.dashboard_picture`.

Takes six minutes: Prometheus scrapes a service on the CPU under a load that grows until requests are refused, and whose
engine is killed once. Each panel's expressions are asked as Grafana asks them; the picture is not Grafana's. Needs
Prometheus (a Debian package).
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
import time
from html import escape
from pathlib import Path
from typing import Any, Final

from benchmarks.monitored_service import Prometheus, load, prometheus
from benchmarks.reliability.processes import Role, process_tree
from benchmarks.service import service

FOLDER: Final = Path(__file__).parent
DASHBOARD: Final = FOLDER.parent / "deploy/grafana/tessera.json"
SERVICE: Final = (
    "--device=cpu", "--enable-prefix-caching=true", "--kv-cache-tokens=2048", "--max-num-seqs=8",
    "--max-concurrent-requests=16",
)  # fmt: skip
# Streams per second, and for how many seconds.
PHASES: Final = ((0.5, 100), (2.0, 100), (40.0, 40), (0.5, 100))
KILL_AFTER: Final = 60
VARIABLES: Final = {"$__rate_interval": "1m", "$instance": ".*"}
STEP: Final = 10
"""Seconds between two values, as between two scrapes."""

CELL: Final = (60, 22)
"""Pixels of a cell of Grafana's grid, which has 24 columns."""
COLORS: Final = ("#2b6cb0", "#c05621", "#2f855a", "#805ad5", "#b83280", "#4a5568")
STYLE: Final = (
    "text{font:11px sans-serif;fill:#2d3748}.t{font-weight:bold}.v{font-size:24px}"
    ".a{fill:#718096;font-size:9px}"
)


def main() -> None:
    """Write docs/dashboard.svg."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    with service(SERVICE) as (url, _), prometheus(url) as server:
        start = time.time()
        killer = threading.Timer(KILL_AFTER, kill_engine)
        killer.start()
        for rate, seconds in PHASES:
            load(url, rate, seconds)
        killer.join()
        drawn = [draw(panel, server, start, time.time()) for panel in panels]
    (FOLDER / "dashboard.svg").write_text(picture(panels, drawn))


def kill_engine() -> None:
    """End the engine process of the service that this process has started."""
    (engine,) = [it.pid for it in process_tree(os.getpid()) if it.role is Role.ENGINE]
    os.kill(engine, signal.SIGKILL)


def picture(panels: list[dict[str, Any]], drawn: list[str]) -> str:
    """Return the SVG of all panels."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = 24 * CELL[0], rows * CELL[1] + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    back = f'<rect width="{width}" height="{height}" fill="#edf2f7"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", back, *drawn, "</svg>\n"])


def draw(panel: dict[str, Any], server: Prometheus, start: float, end: float) -> str:
    """Return the SVG of one panel, at its place."""
    at = panel["gridPos"]
    x, y, width, height = (at[key] * CELL[key in "yh"] for key in "xywh")
    if panel["type"] == "row":
        return text(x + 6, y + 17, panel["title"], "t")
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "none")
    found = [
        (legend(target.get("legendFormat", ""), series["metric"]), series)
        for target in panel["targets"]
        for series in server.series(expression(target["expr"]), start, end, STEP)
    ]
    parts = [
        f'<rect x="3" y="3" width="{width - 6}" height="{height - 6}" rx="3" fill="#fff"/>',
        text(12, 19, panel["title"], "t"),
    ]
    if panel["type"] == "stat":
        value = float(found[0][1]["values"][-1][1])
        parts.append(text(12, 58, shown(value, unit), "v"))
    elif panel["type"] == "table":
        parts += table([series["metric"] for _, series in found], height)
    else:
        parts += plot(found, unit, (start, end), (width, height))
    return f'<g transform="translate({x} {y})">{"".join(parts)}</g>'


def expression(template: str) -> str:
    """Return a panel's expression with values for Grafana's variables."""
    for name, value in VARIABLES.items():
        template = template.replace(name, value)
    return template


def legend(template: str, labels: dict[str, str]) -> str:
    """Return a series' name. There is one instance, which is left out."""
    named = labels | {"instance": ""}
    return re.sub(r"{{(\w+)}}", lambda found: named.get(found[1], ""), template).strip()


def plot(
    found: list[tuple[str, dict[str, Any]]],
    unit: str,
    times: tuple[float, float],
    size: tuple[int, int],
) -> list[str]:
    """Return axes, lines and names of a panel of series over time."""
    left, top, right, bottom = 58, 30, size[0] - 16, size[1] - 40
    lines = [
        [(float(at), float(value)) for at, value in series["values"] if math.isfinite(float(value))]
        for _, series in found
    ]
    most = rounded_up(max((value for line in lines for _, value in line), default=0) or 1)

    def at(moment: float, value: float) -> tuple[float, float]:
        share = (moment - times[0]) / (times[1] - times[0])
        return left + share * (right - left), bottom - value / most * (bottom - top)

    parts = []
    for value in (0, most / 2, most):
        height = at(times[0], value)[1]
        parts.append(f'<path d="M{left} {height:.0f}H{right}" stroke="#e2e8f0"/>')
        parts.append(text(left - 5, height + 3, shown(value, unit), "a", "end"))
    minutes = range(int((times[1] - times[0]) / 60) + 1)
    parts += [
        text(at(times[0] + 60 * minute, 0)[0], bottom + 12, f"{minute} min", "a", "middle")
        for minute in minutes
    ]
    place = float(left)
    for number, ((name, _), line) in enumerate(zip(found, lines, strict=True)):
        color = COLORS[number % len(COLORS)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        )
        if name:
            parts.append(
                f'<rect x="{place:.0f}" y="{bottom + 20}" width="10" height="3" fill="{color}"/>'
            )
            parts.append(text(place + 13, bottom + 25, name, "a"))
            place += 13 + 5.2 * len(name) + 12
    return parts


def table(rows: list[dict[str, str]], height: int) -> list[str]:
    """Return the labels of each series, a line each."""
    hidden = {"__name__", "job", "instance"}
    lines = ["  ".join(f"{k}={v}" for k, v in row.items() if k not in hidden) for row in rows]
    return [
        text(12, 40 + 15 * number, line)
        for number, line in enumerate(lines)
        if 40 + 15 * number < height
    ]


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def rounded_up(value: float) -> float:
    """Return the next number of the form 1, 2, 4, 5 or 8 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value * 0.999)


def shown(value: float, unit: str) -> str:
    """Return a value in Grafana's unit, with three digits."""
    if unit == "s" and value < 1:
        return f"{1000 * value:.3g} ms"
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    plain = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return plain + {"s": " s", "reqps": "/s"}.get(unit, "")


if __name__ == "__main__":
    main()
