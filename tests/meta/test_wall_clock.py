"""No test fails because the machine is busy: none says how long something may take by the wall clock."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parents[1]

# Programs that measure, and their judgement of a service beside a control (`tests.control`).
INSTRUMENTS = ("attacks", "reliability")
# Runs on a machine of its own.
ALONE = ("gpu",)

CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"}
WAITS = {"wait_for", "timeout", "wait", "join", "result", "until", "reached"}
LEAST = 60.0
"""Seconds of a limit that only a fault reaches. A test that sets one takes `tests.waiting.GIVE_UP`."""
POLL = 1.0
"""Seconds below which `wait` is part of a loop, or is expected to return without its event."""


def files() -> list[Path]:
    return [
        path
        for path in sorted(TESTS.rglob("*.py"))
        if path.relative_to(TESTS).parts[0] not in INSTRUMENTS + ALONE
    ]


def short_waits(source: str) -> list[int]:
    """Return the lines with a limit of a wait below `LEAST`, unless the test expects that it passes."""
    return sorted({line for line, _ in _limits(ast.parse(source), expected=False)})


def _limits(node: ast.AST, *, expected: bool) -> Iterator[tuple[int, float]]:
    if isinstance(node, ast.With | ast.AsyncWith):
        expected |= any("TimeoutError" in ast.unparse(item) for item in node.items)
    elif isinstance(node, ast.Try):
        expected |= any(h.type and "TimeoutError" in ast.unparse(h.type) for h in node.handlers)
    elif isinstance(node, ast.Call) and not expected:
        for limit in _of_call(node):
            if 0 < limit < LEAST:
                yield node.lineno, limit
    elif isinstance(node, ast.Assert) and _bounds_elapsed_time(node.test):
        yield node.lineno, 0.0
    for child in ast.iter_child_nodes(node):
        yield from _limits(child, expected=expected)


def _of_call(call: ast.Call) -> Iterator[float]:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if ast.unparse(call.func).split(".")[0].isupper():
        return  # a constant: a clock of the test
    given = call.args[-1:] if name in WAITS else []
    given += [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
    for value in given:
        is_number = isinstance(value, ast.Constant) and isinstance(value.value, int | float)
        if is_number and (name != "wait" or value.value >= POLL):
            yield value.value


def _bounds_elapsed_time(test: ast.expr) -> bool:
    """Return whether an assertion compares a difference of the wall clock with a number from above."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                is_reversed = isinstance(operator, ast.Gt | ast.GtE)
                low, high = (right, left) if is_reversed else (left, right)
                if (
                    _is_elapsed(low)
                    and not _has_clock(high)
                    and "allowed(" not in ast.unparse(high)
                ):
                    return True
    return False


def _is_elapsed(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and _has_clock(part)
        for part in ast.walk(node)
    )


def _has_clock(node: ast.expr) -> bool:
    return any(
        isinstance(part, ast.Call)
        and getattr(part.func, "attr", getattr(part.func, "id", "")) in CLOCKS
        for part in ast.walk(node)
    )


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_bounds_a_wait_or_a_duration_by_the_wall_clock(path):
    assert short_waits(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - began < 5",
        "assert 0.5 < time.perf_counter() - began <= limit",
        "assert 3 > time.time() - began",
        "await asyncio.wait_for(task, 5)",
        "process.wait(timeout=20)",
        "httpx.get(url, timeout=9.5)",
        "until(lambda: done, 10)",
    ],
)
def test_a_bound_is_found(line):
    assert short_waits(line) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - began > 0.5",
        "assert before < time.monotonic()",
        "assert time.thread_time() - began < 2",
        "assert time.monotonic() - began < control.allowed(2)",
        "await asyncio.wait_for(task, GIVE_UP)",
        "with pytest.raises(TimeoutError):\n    await asyncio.wait_for(task, 0.01)",
        "event.wait(0)",
    ],
)
def test_a_lower_bound_and_an_expected_expiry_are_none(line):
    assert short_waits(line) == []
