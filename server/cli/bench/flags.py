"""Flags that the benchmarks share, and checks of their values."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def add_result_flags(parser: argparse.ArgumentParser, usual_label: str) -> None:
    """Add `--label`, `--json` and `--commit`.

    Args:
        parser: of the command.
        usual_label: description of the default label.
    """
    parser.add_argument("--label", help=f"the model's name in the result; default: {usual_label}")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="file for the result, or folder for a file with the default name",
    )
    parser.add_argument(
        "--commit", help="commit of the code, for the result; default: that of the git checkout"
    )


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
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"{text!r} is not a number more than 0")
    return number
