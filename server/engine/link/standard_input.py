"""How a process of the service learns what it is for, and that whoever started it is gone: by its standard input."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys


def read_line() -> bytes:
    """Return the first line; it may be longer than a pipe's buffer. Empty where the input ends before."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (part := os.read(sys.stdin.fileno(), 65536)):
            return b""
        line += part
    return bytes(line)


def end_with_parent(directory: str) -> None:
    """Leave when standard input ends: our parent is gone, however it went.

    Args:
        directory: of the sockets; removed, since a parent that was killed could not.
    """
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):
            pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)
