"""Tells the front end and the log which phase of its start-up the engine is in, and for how long it was."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from server.engine.core.messages import StartupPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.engine.core.engine import EngineChannel

log = logging.getLogger("tessera.engine")


def log_phase(name: str, seconds: float) -> None:
    """Tell the log how long a phase took."""
    log.info("%-28s %6.2f s", name, seconds)


@contextmanager
def clocked(name: str) -> Iterator[None]:
    """Tell the log, where it is to have such detail, how long a part of a phase took; nothing of one that raises."""
    start = time.perf_counter()
    yield
    log.debug("  %-26s %6.2f s", name, time.perf_counter() - start)


class Phases:
    """Announces each phase and notes how long it took.

    Attributes:
        current: name of the phase that runs, or of the one that raised.
        seconds: of each finished phase, in order.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self.current = "starting"
        self.seconds: dict[str, float] = {}
        self._channel = channel
        self._said = 0.0

    def say(self, progress: str) -> None:
        """Tell the front end how far the phase is, at most once a second."""
        if time.monotonic() - self._said > 1.0:
            self._said = time.monotonic()
            self._channel.send(StartupPhase(progress))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run the enclosed work as the phase `name`."""
        self.current = name
        self._channel.send(StartupPhase(name))
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        log_phase(name, self.seconds[name])
