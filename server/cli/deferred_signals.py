"""Has signals wait while something is begun that could not be undone yet. Knows nothing of what."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Hold signals back until the block has ended, then raise those that came.

    For the main thread, before an event loop runs in it.

    Args:
        numbers: of the signals.
    """
    came: list[int] = []

    def remember(number: int, _: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, remember) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in came:
            signal.raise_signal(late)
