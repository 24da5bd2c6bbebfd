"""Defers signals during a critical section, except where it takes long."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@contextlib.contextmanager
def deferred_signals(
    *numbers: signal.Signals, note: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Collect signals until the block ends, then raise them again.

    Only for the main thread, before an event loop runs in it.

    Args:
        numbers: the signals.
        note: called when one of them comes.
    """
    pending: list[int] = []

    def collect(number: int, _: FrameType | None) -> None:
        pending.append(number)
        note()

    handlers = {number: signal.signal(number, collect) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in pending:
            signal.raise_signal(late)


@contextlib.contextmanager
def exit_on_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Exit when a signal comes, also within `deferred_signals`.

    Only for the main thread, where no module is imported and an exception does no harm.
    """
    handlers = {number: signal.signal(number, lambda *_: sys.exit(0)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
