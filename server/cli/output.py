"""Writes the result of a command."""

from __future__ import annotations

import os
import sys


def write_result(text: str) -> None:
    """Print a result; a reader that has read enough, as in `tessera plan | head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # at exit, Python flushes once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
