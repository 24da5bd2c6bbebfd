"""Writes the results of commands."""

from __future__ import annotations

import os
import sys


def write_result(text: str) -> None:
    """Print a result; a reader that has read enough, as in `tessera plan | head`, is no error.

    Exits with status 1 and a message if it cannot be written, as on a full disk.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        # At exit, Python flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"tessera: error: standard output: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None


def printable(text: str) -> str:
    """Replace control characters: a text of a server or of a folder must not be able to change the terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
