"""Bounds of numbers in a form in which the grammar's library enforces them exactly.

The library computes with 64-bit floats and integers, and takes the end of some open intervals for a part of them.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, Final, TypeAlias

Limit: TypeAlias = tuple[int | float, bool] | None
"""A bound, and whether it is excluded; None for none."""

KEYWORDS: Final[tuple[str, ...]] = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)
# The last integers of 64 bits that are floats too.
_MOST_INTEGER: Final = 2**63 - 1024
# Up to here a float has a fraction, and the library writes no exponents within bounds.
_MOST_FLOAT: Final = float(2**53)
_MOST_STEP: Final = 10**6


def integer_bounds(node: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the keywords for integers, and those of the node that they do not enforce."""
    low, high = limits(node)
    least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    out: dict[str, Any] = {}
    lost: list[str] = []
    step, exact = _integer_step(node.get("multipleOf"))
    if step is not None and step > 1:
        if step > _MOST_STEP:
            exact = False
        else:
            out["multipleOf"] = step
    if not exact:
        lost.append("multipleOf")
    if least is not None and most is not None and least > most:
        return {"minimum": 1, "maximum": 0}, lost
    kept = [key for key in KEYWORDS[:4] if key in node]
    if (least or 0) > _MOST_INTEGER or (most or 0) < -_MOST_INTEGER:
        return out, lost + kept
    lowest = None if least is None else _float_above(max(least, -_MOST_INTEGER))
    highest = None if most is None else _float_below(min(most, _MOST_INTEGER))
    if lowest is not None and highest is not None and lowest > highest:
        return out, lost + kept
    if lowest is not None:
        out["minimum"] = lowest
    if highest is not None:
        out["maximum"] = highest
    return out, lost


def number_bounds(node: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the keywords for numbers that are not integers only, and those of the node that they do not enforce."""
    out: dict[str, Any] = {}
    lost: list[str] = []
    if (step := node.get("multipleOf")) is not None:
        scaled = step * 1024
        # The multiples of other fractions are no floats, so that readers disagree about them.
        if scaled == scaled // 1 and step <= _MOST_STEP:
            out["multipleOf"] = step
        else:
            lost.append("multipleOf")
    low, high = limits(node)
    if low is None and high is None:
        return out, lost
    lowest = None if low is None else max(low[0], -_MOST_FLOAT)
    highest = None if high is None else min(high[0], _MOST_FLOAT)
    if (lowest is not None and lowest > _MOST_FLOAT) or (
        highest is not None and highest < -_MOST_FLOAT
    ):
        return out, lost + [key for key in KEYWORDS[:4] if key in node]
    width = None if lowest is None or highest is None else highest - lowest
    if lowest is not None and low is not None:
        out["minimum"] = _inside(lowest, width, 1) if low[1] else _exactly(lowest)
    if highest is not None and high is not None:
        out["maximum"] = _inside(highest, width, -1) if high[1] else _exactly(highest)
    if width is not None and (
        width < 0 or (not width and ((low and low[1]) or (high and high[1])))
    ):
        return {"minimum": 1, "maximum": 0}, lost
    if width is not None and out["minimum"] > out["maximum"]:
        return {k: v for k, v in out.items() if k == "multipleOf"}, lost + [
            key for key in KEYWORDS[:4] if key in node
        ]
    return out, lost


def limits(node: dict[str, Any]) -> tuple[Limit, Limit]:
    """Return the lower and the upper bound of a node's numbers."""
    low = [(node["minimum"], False)] if "minimum" in node else []
    low += [(node["exclusiveMinimum"], True)] if "exclusiveMinimum" in node else []
    high = [(node["maximum"], False)] if "maximum" in node else []
    high += [(node["exclusiveMaximum"], True)] if "exclusiveMaximum" in node else []
    return (
        max(low, default=None),
        min(high, key=lambda bound: (bound[0], not bound[1]), default=None),
    )


def _integer_step(step: int | float | None) -> tuple[int | None, bool]:
    """Return the step of integers that are multiples of a number, and whether it is exact."""
    if step is None:
        return None, True
    top, bottom = Decimal(repr(step)).as_integer_ratio()
    # Readers compute with floats, for which 3 is no multiple of 0.3.
    exact = bottom == 1 or bottom & (bottom - 1) == 0
    return top, exact


def _float_above(value: int) -> int:
    near = float(value)
    return int(near if near >= value else math.nextafter(near, math.inf))


def _float_below(value: int) -> int:
    near = float(value)
    return int(near if near <= value else math.nextafter(near, -math.inf))


def _exactly(value: int | float) -> int | float:
    return value if isinstance(value, float) else float(value) if abs(value) > 2**53 else value


def _inside(bound: int | float, width: int | float | None, sign: int) -> float:
    """Return a number just inside of an excluded bound, with few digits."""
    digits = 6
    while width is not None and 0 < width < 10.0 ** (2 - digits) and digits < 300:
        digits += 1
    near = float(Decimal(repr(bound)) + sign * Decimal(10) ** -digits)
    if (near - bound) * sign > 0:
        return near
    return math.nextafter(float(bound), sign * math.inf)
