"""Starts the process that is to be an engine, before anybody knows which engine it will be.

It imports PyTorch at once, which takes longer than all that a command does until it has read its settings, and learns
the rest on its standard input. Imports next to nothing, so that a command can do this first of all.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINE_COMMAND = (sys.executable, "-m", "server.engine.link.process")
"""Starts an engine process."""


class EngineStartError(Exception):
    """The engine could not start; the text says why."""


def spawn(command: Sequence[str] = ENGINE_COMMAND) -> subprocess.Popen[bytes]:
    """Start a process that waits for a `server.engine.link.protocol.EngineLaunch` on its standard input.

    It ends by itself when that input ends, before it was told anything or later.

    Args:
        command: what to run.

    Raises:
        EngineStartError: the operating system refuses.
    """
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - our own command
    except OSError as error:
        raise EngineStartError(f"the engine process cannot be started: {error}") from error


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process at once if it still runs."""
    if process.poll() is None:
        process.kill()
        process.wait()
