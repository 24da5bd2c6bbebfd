"""Types of flags' values, with messages that name the value and what is allowed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a function that raises ValueError as an argparse type, so that argparse prints the message."""

    def check(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return check


@checked
def natural(text: str) -> int:
    """Read a number from 0 on."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


@checked
def count(text: str) -> int:
    """Read a number from 1 on."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


@checked
def positive(text: str) -> float:
    """Read a finite number of more than 0."""
    if not 0 < (number := _number(text)) < float("inf"):
        raise ValueError(f"{text!r} is not a number more than 0")
    return number


def between(least: float, most: float) -> Callable[[str], float]:
    """Return a type that reads a number within limits, both included."""

    @checked
    def read(text: str) -> float:
        if not least <= (number := _number(text)) <= most:
            raise ValueError(f"{text!r} is not a number from {least:g} to {most:g}")
        return number

    return read


@checked
def whole(text: str) -> int:
    """Read a whole number, negative ones too."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")  # within no limits
