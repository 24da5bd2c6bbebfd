"""Writes results and errors of commands."""

from __future__ import annotations

import os
import sys
from typing import Final, NoReturn

INTERRUPTED: Final = 130
"""Exit status of a command that Ctrl-C has ended: 128 and the number of SIGINT, as shells report it."""


def write_result(text: str) -> None:
    """Print a result; a reader that has read enough, as in `tessera plan | head`, is no error.

    Exits with status 1 and a message if it cannot be written, as on a full disk.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        discard_output()
        if not isinstance(error, BrokenPipeError):
            print(f"tessera: error: standard output: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None


def discard_output() -> None:
    """Drop what is written to standard output from now on: at exit Python flushes it once more, to a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(message: str, command: str, status: int = 1) -> NoReturn:
    """Print an error to standard error and exit.

    Args:
        message: of one line.
        command: its name, such as "bench engine".
        status: 1 if the command failed, 2 if its arguments are wrong.
    """
    print(f"tessera {command}: error: {message}", file=sys.stderr)
    raise SystemExit(status)


def printable(text: str) -> str:
    """Replace control characters: a text of a server or of a folder must not be able to change the terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
