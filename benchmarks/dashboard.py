"""Checks the dashboard and the rules against a real Prometheus, and draws the dashboard's rows as pictures.

    python -m benchmarks.dashboard [--seconds 240] [--light]

Runs the bundled model with two engines and the command `prometheus` (Debian's package of this name), which scrapes it
with the rules of deploy/prometheus. The load has a burst, of which the service refuses a part, and an engine is killed.
Then every expression of dashboard and rules must have data; docs/dashboard-*.svg show those of the panels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

from benchmarks.service import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ROOT: Final = Path(__file__).parents[1]
PICTURES: Final = _ROOT / "docs"
_RULES: Final = _ROOT / "deploy" / "prometheus"
_SCRAPE_SECONDS: Final = 2
# The values that Grafana would give its variables.
_VARIABLES: Final = {"$__rate_interval": "30s", "$instance": ".*"}
_LABEL: Final = re.compile(r"\{\{(\w+)\}\}")
_COMPARISON: Final = re.compile(r"\s*(?:==|>|<)\s*[\d.]+\s*$")
_COLORS: Final = (
    "#3274d9",
    "#e0752d",
    "#37872d",
    "#a352cc",
    "#c4162a",
    "#8f6b00",
    "#0a8a8a",
    "#6e6e6e",
)
_COLUMN, _CELL, _MARGIN = 50, 30, 8
"""Pixels of a column and of a unit of height of Grafana's grid, and around a panel."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel.

    Attributes:
        name: for the legend.
        labels: of the series.
        points: Unix times in seconds, and values.
    """

    name: str
    labels: dict[str, str]
    points: list[tuple[float, float]]


def dashboard_rows() -> dict[str, list[dict[str, Any]]]:
    """Return the panels of each row of the dashboard, by its title."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for panel in json.loads((_ROOT / "deploy/grafana/tessera.json").read_text())["panels"]:
        if panel["type"] == "row":
            rows[panel["title"]] = []
        else:
            rows[next(reversed(rows))].append(panel)
    return rows


def picture_name(row: str) -> str:
    """Return the name of the file that shows a row."""
    return f"dashboard-{row.lower().replace(' ', '-')}.svg"


def without_comparison(expression: str) -> str:
    """Return the value that an alert compares, which has data while the alert is silent."""
    return _COMPARISON.sub("", expression)


class Prometheus:
    """Asks a Prometheus about a span of time.

    Args:
        url: of the Prometheus.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.start = time.time()

    def series(self, expression: str, legend: str = "") -> list[Series]:
        """Return the series of an expression that have a value since the start.

        Args:
            expression: in PromQL.
            legend: Grafana's form of a name, with labels in double braces.
        """
        span = {"start": self.start, "end": time.time(), "step": _SCRAPE_SECONDS}
        return [
            Series(
                _named(legend, it["metric"]),
                it["metric"],
                [(when, float(value)) for when, value in it["values"] if value != "NaN"],
            )
            for it in self._get("query_range", {"query": expression} | span)["result"]
            if any(value != "NaN" for _, value in it["values"])
        ]

    def rules(self) -> list[str]:
        """Return the expressions of the rules, those of alerts without the comparison."""
        groups = self._get("rules", {})["groups"]
        return [without_comparison(rule["query"]) for group in groups for rule in group["rules"]]

    def _get(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url) as reply:  # noqa: S310 - our own
            data: dict[str, Any] = json.load(reply)["data"]
        return data


def draw_row(panels: Sequence[dict[str, Any]], series: Sequence[list[Series]]) -> str:
    """Return a picture (SVG) of the panels of a row.

    Args:
        panels: of the dashboard.
        series: of each panel.
    """
    top = min(panel["gridPos"]["y"] for panel in panels)
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) - top
    size = f'width="{24 * _COLUMN}" height="{height * _CELL}"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="#24292e">',
        '<rect width="100%" height="100%" fill="#f4f5f5"/>',
    ]
    for panel, lines in zip(panels, series, strict=True):
        at = panel["gridPos"]
        width, tall = at["w"] * _COLUMN - _MARGIN, at["h"] * _CELL - _MARGIN
        x, y = at["x"] * _COLUMN + _MARGIN // 2, (at["y"] - top) * _CELL + _MARGIN // 2
        drawn += [
            f'<svg x="{x}" y="{y}" width="{width}" height="{tall}">',
            '<rect width="100%" height="100%" fill="#fff" stroke="#d8d9da"/>',
            _text(10, 18, panel["title"], 'font-weight="bold"'),
            *_DRAWERS[panel["type"]](panel, lines, width, tall),
            "</svg>",
        ]
    return "\n".join([*drawn, "</svg>\n"])


def shown(value: float, unit: str | None) -> str:
    """Return a value with its unit, for people."""
    if unit == "s":
        return f"{value:.3g} s" if abs(value) >= 1 or not value else f"{1000 * value:.3g} ms"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    suffix = "/s" if unit == "reqps" else ""
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}") + suffix


def round_step(value: float) -> float:
    """Return the least of 1, 2, 2.5 and 5 times a power of ten that is not less than a value; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return power * next(part for part in (1, 2, 2.5, 5, 10) if part * power >= value * (1 - 1e-9))


def _named(legend: str, labels: dict[str, str]) -> str:
    return _LABEL.sub(lambda name: labels.get(name[1], ""), legend)


def _filled(expression: str) -> str:
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {attributes}>{escape(text)}</text>'


def _unit(panel: dict[str, Any]) -> str | None:
    unit: str | None = panel["fieldConfig"]["defaults"].get("unit")
    return unit


def _stat(panel: dict[str, Any], lines: list[Series], width: int, tall: int) -> Iterator[str]:
    value = shown(lines[0].points[-1][1], _unit(panel)) if lines else "no data"
    yield _text(
        width / 2, tall / 2 + 18, value, 'text-anchor="middle" font-size="30" fill="#37872d"'
    )


def _table(_: dict[str, Any], lines: list[Series], width: int, __: int) -> Iterator[str]:
    names = sorted(
        {name for line in lines for name in line.labels} - {"__name__", "job", "instance"}
    )
    rows = [names, *([line.labels.get(name, "") for name in names] for line in lines)]
    for place, row in enumerate(rows):
        for column, value in enumerate(row):
            color = "" if place else 'fill="#6e6e6e"'
            yield _text(10 + column * (width - 10) / len(names), 44 + 20 * place, value, color)


def _plot(panel: dict[str, Any], lines: list[Series], width: int, tall: int) -> Iterator[str]:
    if not lines:
        yield _text(width / 2, tall / 2, "no data", 'text-anchor="middle"')
        return
    legend = 15 * ((len(lines) + 1) // 2)
    left, right, above, below = 62, width - 24, 32, tall - 24 - legend
    times = [when for line in lines for when, _ in line.points]
    first, seconds = min(times), max(1.0, max(times) - min(times))
    tick = round_step(max(value for line in lines for _, value in line.points) / 4)
    for part in range(5):
        y = below - (below - above) * part / 4
        yield f'<path d="M{left} {y:.1f}H{right}" stroke="#e5e5e5"/>'
        yield _text(left - 5, y + 4, shown(tick * part, _unit(panel)), 'text-anchor="end"')
    step = round_step(seconds / 4)
    for part in range(int(seconds / step) + 1):
        x = left + (right - left) * part * step / seconds
        yield _text(x, below + 15, f"{part * step:g} s", 'text-anchor="middle" fill="#6e6e6e"')
    for place, line in enumerate(lines):
        color = _COLORS[place % len(_COLORS)]
        points = " ".join(
            f"{left + (right - left) * (when - first) / seconds:.1f},{below - (below - above) * value / tick / 4:.1f}"
            for when, value in line.points
        )
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        x, y = 12 + (place % 2) * width / 2, below + 32 + 15 * (place // 2)
        yield f'<path d="M{x:.0f} {y - 4}h12" stroke="{color}" stroke-width="3"/>'
        yield _text(x + 17, y, line.name.strip() or "value")


_DRAWERS: Final = {"stat": _stat, "table": _table, "timeseries": _plot}


@contextlib.contextmanager
def _process(command: Sequence[str], ready: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command from the first 200 of an address on."""
    process = subprocess.Popen(command)
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(ready):  # noqa: S310 - our own
                break
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()


def _generate(url: str, number: int, done: threading.Event, pause: float) -> None:
    """Send requests one after the other; those that are refused or lost belong to the load."""
    while not done.is_set():
        number += 1
        prompt = (
            f"# Module {number % 5}: " + "reads a configuration file and checks each value. " * 8
        )
        parameters = {"max_new_tokens": 40 + 25 * (number % 3), "ignore_eos": True}
        body = json.dumps({"inputs": prompt + "\ndef ", "parameters": parameters}).encode()
        request = urllib.request.Request(  # noqa: S310 - our own
            f"{url}/generate", body, {"Content-Type": "application/json"}
        )
        with (
            contextlib.suppress(urllib.error.HTTPError, OSError),
            urllib.request.urlopen(request) as reply,  # noqa: S310 - our own
        ):
            reply.read()
        done.wait(pause)


@contextlib.contextmanager
def _clients(url: str, count: int, pause: float) -> Iterator[None]:
    done = threading.Event()
    threads = [
        threading.Thread(target=_generate, args=(url, 3 * i, done, pause)) for i in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _kill_engine(service: subprocess.Popen[bytes]) -> None:
    children = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text().split()
    engines = [it for it in children if b"engine" in Path(f"/proc/{it}/cmdline").read_bytes()]
    os.kill(int(engines[-1]), signal.SIGKILL)


def _load(url: str, service: subprocess.Popen[bytes], seconds: float, *, light: bool) -> None:
    """Two clients all the time; unless light, in the third fifth 24 more, and then the death of an engine."""
    with _clients(url, 2, 0.5):
        if light:
            time.sleep(seconds)
            return
        time.sleep(0.4 * seconds)
        with _clients(url, 24, 0.1):
            time.sleep(0.2 * seconds)
        time.sleep(0.1 * seconds)
        _kill_engine(service)
        time.sleep(0.3 * seconds)


def _configuration(target: str) -> str:
    """Return a configuration for Prometheus, as JSON, which is YAML."""
    interval = f"{_SCRAPE_SECONDS}s"
    job = {
        "job_name": "tessera",
        "static_configs": [{"targets": [target], "labels": {"instance": "tessera:8000"}}],
    }
    return json.dumps(
        {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": [str(_RULES / "recording.yml"), str(_RULES / "alerts.yml")],
            "scrape_configs": [job],
        }
    )


@contextlib.contextmanager
def _running() -> Iterator[tuple[str, subprocess.Popen[bytes], Prometheus]]:
    """Run the service and the Prometheus that scrapes it."""
    port, own = free_port(), free_port()
    serve = [
        sys.executable, "-m", "server.cli.main", "serve", f"--port={port}", "--device=cpu", "--data-parallel=2",
        "--cpu-threads=1", "--max-num-seqs=4", "--max-concurrent-requests=16", "--log-level=warning",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        configuration = Path(folder) / "prometheus.yml"
        configuration.write_text(_configuration(f"127.0.0.1:{port}"))
        prometheus = [
            "prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{own}", "--log.level=error",
        ]  # fmt: skip
        url, other = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{own}"
        with _process(serve, f"{url}/health") as service, _process(prometheus, f"{other}/-/ready"):
            yield url, service, Prometheus(other)


def main() -> None:
    """Run, check and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="of load")
    parser.add_argument(
        "--light", action="store_true", help="without burst and killed engine; draws nothing"
    )
    options = parser.parse_args()
    rows = dashboard_rows()
    drawn: dict[str, str] = {}
    with _running() as (url, service, prometheus):
        _load(url, service, options.seconds, light=options.light)
        expressions = prometheus.rules()
        for row, panels in rows.items():
            expressions += [
                _filled(target["expr"]) for panel in panels for target in panel["targets"]
            ]
            series = [
                [
                    line
                    for target in panel["targets"]
                    for line in prometheus.series(
                        _filled(target["expr"]), target.get("legendFormat", "")
                    )
                ]
                for panel in panels
            ]
            drawn[picture_name(row)] = draw_row(panels, series)
        empty = [it for it in expressions if not prometheus.series(it)]
        alerts = prometheus.series('ALERTS{alertstate="firing"}', "{{alertname}}")
    print(
        f"{len(expressions) - len(empty)} of {len(expressions)} expressions have data",
        *empty,
        sep="\n",
    )
    print("alerts that fired:", *sorted({alert.name for alert in alerts}))
    if empty:
        raise SystemExit(1)
    for name, picture in drawn.items() if not options.light else ():
        (PICTURES / name).write_text(picture)


if __name__ == "__main__":
    main()
