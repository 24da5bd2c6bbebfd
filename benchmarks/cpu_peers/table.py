"""Medians and ratios of the contenders' figures."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.cpu_peers.work import QUANTIZED
from server.cli.bench.result import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Key = tuple[str, str, str, str]
"""Model, contender, weights, metric."""
Samples = dict[Key, list[float]]

SMALL: Final = ("smollm2-135m", "bundled")
_SMALL_GOAL = 1.2
_ALONE_GOALS = {"int8": 1.0, "auto": 1.0, "int4": 0.9}
_STREAMS_GOAL, _PREFILL_GOAL = 2.0, 1.0
_TRANSFORMERS_GOAL, _SCALING_GOAL = 3.0, 4.0
_BETTER = ("Q8_0", "Q4_0")
_FILE_GOALS: Final = {
    "alone": ("engine", "llama-bench", "decode_1", 1.3),
    "alone, HTTP": ("service", "llama-server", "http_1", None),
    "8 streams, HTTP": ("service", "llama-server", "http_8", 3.0),
    "prompt of 512": ("engine", "llama-bench", "prefill_512", 1.7),
    "resident memory after the run": ("service", "llama-server", "rss_used", None),
}
"""Contenders that read the same file, metric and goal."""


class Ratio(NamedTuple):
    """A ratio of two medians.

    Attributes:
        what: names the two figures.
        value: above 1 where Tessera is faster or takes more memory.
        goal: the value to reach; None where there is none.
    """

    model: str
    what: str
    value: float
    goal: float | None = None


def rows(samples: Samples) -> list[dict[str, Any]]:
    """Return one record for each figure, with its median and every sample."""
    return [
        {
            "model": model,
            "contender": contender,
            "weights": weights,
            "metric": metric,
            "value": number(statistics.median(values)),
            "samples": [number(value) for value in values],
        }
        for (model, contender, weights, metric), values in samples.items()
    ]


def ratios(samples: Samples) -> list[Ratio]:
    """Return the ratios for which there are figures."""
    medians = {key: statistics.median(values) for key, values in samples.items() if values}
    out: list[Ratio] = []
    for model in dict.fromkeys(key[0] for key in samples):
        for weights in dict.fromkeys(
            key[2] for key in samples if key[0] == model and key[1] in ("engine", "service")
        ):
            of = _of_model if weights in QUANTIZED else _of_file
            out += of(model, weights, lambda *rest, m=model: medians.get((m, *rest)))
    return out


def _of_file(model: str, form: str, get: Callable[..., float | None]) -> Iterator[Ratio]:
    """Return the ratios of a file that Tessera and llama.cpp both read; `get` as in `_of_model`."""
    for what, (ours, theirs, metric, goal) in _FILE_GOALS.items():
        values = get(ours, form, metric), get(theirs, form, metric)
        if values[0] is not None and values[1]:
            yield Ratio(model, f"{form}, {what}", values[0] / values[1], goal)


def _of_model(model: str, quantization: str, get: Callable[..., float | None]) -> Iterator[Ratio]:
    """Return the ratios of one model and value of `--quantization`.

    Args:
        model: its name.
        quantization: the value.
        get: returns the median of (contender, weights, metric), None where there is none.
    """
    small, peer = model in SMALL, QUANTIZED[quantization]
    bounded = quantization in _ALONE_GOALS

    def best(contender: str, metric: str) -> float | None:
        found = (get(contender, weights, metric) for weights in _BETTER)
        return max((value for value in found if value is not None), default=None)

    def goal(value: float) -> float | None:
        return (_SMALL_GOAL if small else value) if bounded else None

    def ratio(
        what: str, ours: float | None, theirs: float | None, aim: float | None = None
    ) -> Iterator[Ratio]:
        if ours is not None and theirs:
            yield Ratio(model, what, ours / theirs, aim)

    one, http = get("engine", quantization, "decode_1"), get("service", quantization, "http_1")
    alone = _ALONE_GOALS.get(quantization, 1.0)
    yield from ratio(
        f"{quantization} alone / {peer} alone",
        one,
        get("llama-bench", peer, "decode_1"),
        goal(alone),
    )
    yield from ratio(
        f"{quantization} alone / {peer} alone, HTTP", http, get("llama-server", peer, "http_1")
    )
    yield from ratio(
        f"{quantization}, 8 streams / the better of Q8_0 and Q4_0, HTTP",
        get("service", quantization, "http_8"), best("llama-server", "http_8"), goal(_STREAMS_GOAL),
    )  # fmt: skip
    yield from ratio(
        f"{quantization}, prompt of 512 / the better of Q8_0 and Q4_0",
        get("engine", quantization, "prefill_512"), best("llama-bench", "prefill_512"), goal(_PREFILL_GOAL),
    )  # fmt: skip
    yield from ratio(
        f"{quantization} alone / transformers", one, get("transformers", "float32", "decode_1"), _TRANSFORMERS_GOAL
    )  # fmt: skip
    if model == "bundled":
        eight = get("engine", quantization, "decode_8")
        yield from ratio(f"{quantization}, 8 streams / alone", eight, one, _SCALING_GOAL)
    yield from ratio(
        f"{quantization} / {peer}, resident memory after the run",
        get("service", quantization, "rss_used"), get("llama-server", peer, "rss_used"),
    )  # fmt: skip


def render(found: Sequence[Ratio]) -> str:
    """Return the ratios as a Markdown table."""
    lines = ["| model | ratio | value | goal |", "|---|---|---|---|"]
    for model, what, value, goal in found:
        aim = "" if goal is None else f"{goal:.1f}" + ("" if value >= goal else " (missed)")
        lines.append(f"| {model} | {what} | {value:.2f} | {aim} |")
    return "\n".join(lines)
