"""The limits of a template's rendering: its budget, the weight of values, and checks before an operation is done.

`model.text.template_sandbox` applies them. What could grow faster than its operands (repetition, `replace`, `join`,
formatting with a width, powers) is checked before it is computed.
"""

from __future__ import annotations

import itertools
import re
import time
from typing import Any, Final

MAX_SOURCE: Final = 1 << 20
"""Characters of a template."""
MAX_VALUE: Final = 8_000_000
"""Weight of one value: a character weighs 1, an item of a list or an object `ITEM` more."""
MAX_WORK: Final = 64_000_000
"""Weight of all values that one rendering creates, and `STEP` for each operation. About one second."""
MAX_SECONDS: Final = 2.0
ITEM: Final = 16
STEP: Final = 16
MAX_BITS: Final = 4096
MAX_INDENT = 16
_MAX_PRECISION = 20
_WIDE_FORMAT: Final = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%(]*(?:\d{4}|\*)")


class TemplateLimitError(Exception):
    """A rendering exceeded its limit of time, memory or output."""


class TemplateRefusalError(Exception):
    """The template called `raise_exception`; the message is the template's."""


class Budget:
    """What one rendering may still use.

    Args:
        seconds: wall-clock time.
    """

    __slots__ = ("_deadline", "_work")

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._work = 0
        self._deadline = time.monotonic() + seconds

    def charge(self, amount: int) -> None:
        """Count work whose time its weight bounds.

        Raises:
            TemplateLimitError: too much of it.
        """
        self._work += amount
        if self._work > MAX_WORK:
            raise TemplateLimitError("it computes too much")

    def step(self) -> None:
        """Count an operation that may read much and create little.

        Raises:
            TemplateLimitError: too many of them, or the time is up.
        """
        self.charge(STEP)
        if time.monotonic() > self._deadline:
            raise TemplateLimitError("it takes too long")


def weight(value: object) -> int:
    """Return the weight of a value, a shared part as often as it occurs.

    Raises:
        TemplateLimitError: more than `MAX_VALUE`.
    """
    if type(value) is str:
        return limited(len(value))
    total = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            total += 2 * ITEM * len(item)
            limited(total)
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            total += ITEM * len(item)
            limited(total)
            stack.extend(item)
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"a number has more than {MAX_BITS} bits")
    return limited(total)


def limited(total: int) -> int:
    """Return a weight.

    Raises:
        TemplateLimitError: more than `MAX_VALUE`.
    """
    if total > MAX_VALUE:
        raise TemplateLimitError(f"a value is larger than {MAX_VALUE}")
    return total


def check_bits(bits: int) -> None:
    """Check the size of a number before it is computed."""
    if bits > MAX_BITS:
        raise TemplateLimitError(f"a number has more than {MAX_BITS} bits")


def check_product(left: Any, right: Any) -> None:
    """Check a repetition or a product of numbers before it is computed."""
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(count, int):
            limited(weight(value) * max(0, count))
            return
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())


def check_percent(text: Any, values: Any) -> None:
    """Check the formatting operator `%` on a text."""
    text = str(text)
    check_widths(text)
    limited(text.count("%") * (weight(values) * 10 + 1000))


def check_widths(text: str) -> None:
    """Check that a format has no large or variable width."""
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("a format has a variable width, or one of more than 999")


def check_replace(text: Any, old: Any = "", new: Any = "", *_count: object) -> None:
    """Check the result's size of `replace`, with the arguments of `str.replace`."""
    text, old = str(text), str(old)
    limited(len(text) + (text.count(old) if old else len(text) + 1) * len(str(new)))


def check_join(values: Any, separator: Any = "", **_attribute: object) -> Any:
    """Check the result's size of `join`; return the values, as a list if they were an iterator."""
    if not isinstance(values, str | list | tuple | dict):
        values = list(itertools.islice(values, MAX_VALUE // ITEM + 1))
    limited(weight(values) + len(values) * len(str(separator)))
    return values


def check_indent(text: Any, width: Any = 4, *_args: object, **_kwargs: object) -> None:
    """Check the result's size of the filter `indent`."""
    size = len(width) if isinstance(width, str) else max(0, int(width))
    limited(len(text) + (len(str(text).splitlines()) + 1) * size)


def check_round(_: object, precision: int = 0, *_args: object, **_kwargs: object) -> None:
    """Check the precision of the filter `round`."""
    if abs(precision) > _MAX_PRECISION:
        raise TemplateLimitError(f"a precision is larger than {_MAX_PRECISION}")


def check_format(text: Any, *args: object, **kwargs: object) -> None:
    """Check the filter `format`."""
    check_percent(text, [args, kwargs])


def depth(value: object) -> int:
    """Return how deep lists and objects are nested."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for item in level
            if isinstance(item, dict | list | tuple)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
