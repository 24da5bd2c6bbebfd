"""Reports the engine's start-up phases and their durations to the front end and the log."""

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
    """Log the duration of a phase."""
    log.info("%-28s %6.2f s", name, seconds)


@contextmanager
def clocked(name: str) -> Iterator[None]:
    """Log the duration of a part of a phase, at debug level. Logs nothing if the part raises."""
    start = time.perf_counter()
    yield
    log.debug("  %-26s %6.2f s", name, time.perf_counter() - start)


class Phases:
    """Reports the phases and keeps their durations.

    Attributes:
        current: name of the current phase, or of the phase that raised.
        seconds: duration of each finished phase, in order.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self.current = "starting"
        self.seconds: dict[str, float] = {}
        self._channel = channel
        self._said = 0.0

    def say(self, progress: str) -> None:
        """Report the progress within the phase to the front end, at most once per second."""
        if time.monotonic() - self._said > 1.0:
            self._said = time.monotonic()
            self._channel.send(StartupPhase(progress))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run the enclosed code as the phase `name`."""
        self.current = name
        self._channel.send(StartupPhase(name))
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        log_phase(name, self.seconds[name])
