"""Reports the engine's start-up phases and their durations to the front end and the log."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from model.progress import Status
from server.engine.core.messages import StartupPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.engine.core.engine import EngineChannel

log = logging.getLogger("tessera.engine")

_SAY_SECONDS: Final = 1.0
"""Between two messages to the front end about the progress within a phase."""


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
        shown: whether a terminal or the log shows the progress within phases, which only one of several ranks does.
    """

    def __init__(self, channel: EngineChannel, *, shown: bool = True) -> None:
        self.current = "starting"
        self.seconds: dict[str, float] = {}
        self.shown = shown
        self._channel = channel
        self._said = 0.0
        self._status = Status(log.info if shown else lambda _: None, shown=shown)
        self._records = False

    def say(self, progress: str) -> None:
        """Report the progress within the phase: to the front end, and on a terminal or in the log."""
        self.tell(progress)
        self._status.show(progress)

    def tell(self, progress: str) -> None:
        """Report the progress within the phase to the front end, at most once per second."""
        if time.monotonic() - self._said > _SAY_SECONDS:
            self._said = time.monotonic()
            self._channel.send(StartupPhase(progress))

    def recorded(self, number: int, total: int) -> None:
        """Report a recording, which an engine makes that is ready and has no requests.

        Args:
            number: of recordings that are made.
            total: of those and the waiting ones.
        """
        if number < total:
            if not self._records:
                self._records = True
                self._status.clear()
            self.say(f"recording step {number + 1} of {total}")
        elif self._records:
            self._records = False
            self._status.clear()
            self._channel.send(StartupPhase("ready"))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run the enclosed code as the phase `name`."""
        self.current = name
        self._channel.send(StartupPhase(name))
        start = time.perf_counter()
        self._status.clear()
        try:
            yield
        finally:
            self._status.clear()
        self.seconds[name] = time.perf_counter() - start
        log_phase(name, self.seconds[name])
