"""The command that starts a process of the service."""

from __future__ import annotations

import sys


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of ours.

    `python -m` alone would import from the working directory first, where anybody may have put a `json.py`.
    """
    return (sys.executable, "-P", "-m", module)
