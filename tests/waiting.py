"""Waits of tests: they end with a condition, and no test says how long it may take.

A machine that is busy with other work makes everything later, so a limit that is close to the usual time fails without
a fault. `tests/meta/test_wall_clock.py` finds such limits.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

GIVE_UP: Final = 120.0
"""Seconds after which a wait is given up: only a fault makes one last that long, on a busy machine too."""


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + GIVE_UP
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Return whether a process exists, other than as a zombie that its new parent has not reaped yet."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def reached(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, while the event loop runs."""
    deadline = time.monotonic() + GIVE_UP
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come to hold"
        await asyncio.sleep(0.005)
