"""Shows how far long work is: a bar on a terminal, elsewhere a line of the log every few seconds.

Imports no PyTorch. Only one thread may use a `Progress` at a time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from tqdm import tqdm

BYTES: Final = "B"
"""The unit of work that is counted in bytes."""
LINE_SECONDS: Final = 5.0
"""Between two lines of a log. Work that takes less time has none."""
_REDRAW_SECONDS: Final = 0.1
_BAR_SECONDS: Final = 0.5
"""Work that takes less time has no bar."""
_WATCH_SECONDS: Final = 0.5
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def _make_bar(**options: Any) -> tqdm[None]:  # noqa: ANN401 - those of tqdm
    # Imported here because most commands show no progress.
    from tqdm import tqdm  # noqa: PLC0415 - as above

    # Else the first bar would make a lock between processes, for which Python may start a process.
    tqdm.set_lock(threading.RLock())
    # Its stub infers that there are no items.
    bar: tqdm[None] = tqdm(leave=False, dynamic_ncols=True, file=sys.stderr, **options)
    return bar


class Progress:
    """The progress of one piece of work.

    On a terminal it is a bar, which is removed at the end. Elsewhere it is a line every `LINE_SECONDS`.

    Args:
        what: the work, such as "compiling kernels"; the beginning of each line.
        say: writes a line, for example to a log.
        total: of the work; 0 if it is not known yet.
        unit: of `total`: `BYTES`, or the plural of what is counted.
        done: how much of it was done earlier; it counts for no rate.
        shown: whether there is a bar on a terminal.
        clock: seconds.
    """

    def __init__(
        self,
        what: str,
        say: Callable[[str], None],
        total: int = 0,
        unit: str = BYTES,
        *,
        done: int = 0,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, done
        self._say, self._clock = say, clock
        self._began = self._line_at = self._drawn_at = clock()
        self._line_done = done
        self._is_terminal, self._shown = sys.stderr.isatty(), shown
        self._bar: tqdm[None] | None = None

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._clock() - self._began

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """Show how far the work is.

        Args:
            done: of the whole work.
            total: of the work, if that has changed.
            note: what is being worked on.
        """
        self.done, self.total = done, self.total if total is None else total
        now = self._clock()
        if self._is_terminal:
            is_due = now - self._drawn_at >= _REDRAW_SECONDS and now - self._began >= _BAR_SECONDS
            if self._shown and is_due:
                self._drawn_at = now
                self._draw(note)
        elif now - self._line_at >= LINE_SECONDS:
            self._say(self.line(note, now))
            self._line_at, self._line_done = now, done

    def line(self, note: str = "", now: float | None = None) -> str:
        """Describe the progress in one line; rates are those since the last line.

        Args:
            note: what is being worked on.
            now: time of the clock; None asks it.
        """
        now = self._clock() if now is None else now
        rate = (self.done - self._line_done) / max(1e-9, now - self._line_at)
        parts = [f"{self.what}: {self.amount}"]
        if self.unit == BYTES:
            parts.append(f"{bytes_text(rate)}/s")
        if note:
            parts.append(note)
        if self.unit == BYTES and rate > 0 and self.total > self.done:
            parts.append(f"{duration_text((self.total - self.done) / rate)} left")
        elif self.unit != BYTES:
            parts.append(f"{duration_text(now - self._began)} so far")
        return ", ".join(parts)

    @property
    def amount(self) -> str:
        """How much is done, such as `12 of 87 kernels (14%)`."""
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        if self.unit == BYTES:
            of = f" of {bytes_text(self.total)}" if self.total else ""
            return f"{bytes_text(self.done)}{of}{share}"
        of = f" of {self.total}" if self.total else ""
        return f"{self.done}{of} {self.unit}{share}"

    def _draw(self, note: str) -> None:
        if self._bar is None:
            in_bytes = self.unit == BYTES
            self._bar = _make_bar(
                desc=self.what,
                total=self.total or None,
                initial=self.done,
                unit=BYTES if in_bytes else f" {self.unit}",
                unit_scale=in_bytes,
                unit_divisor=1024,
            )
        bar = self._bar
        bar.total = self.total or None
        bar.set_postfix_str(note, refresh=False)
        # A bar is also drawn when nothing has changed but the time.
        if not bar.update(self.done - bar.n):
            bar.refresh()


class Status:
    """What long work is doing, where no number says how far it is, or several do.

    On a terminal it is one line that is written anew, elsewhere a line every `LINE_SECONDS`.

    Args:
        say: writes a line, for example to a log.
        shown: whether there is a line on a terminal.
        clock: seconds.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        shown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._shown, self._clock = say, shown, clock
        self._is_terminal = sys.stderr.isatty()
        self._bar: tqdm[None] | None = None
        self._began = self._line_at = clock()

    def show(self, text: str) -> None:
        """Show what the work is doing."""
        now = self._clock()
        if self._is_terminal:
            if self._shown and now - self._began >= _BAR_SECONDS:
                self._draw(text, now)
        elif now - self._line_at >= LINE_SECONDS:
            self._line_at = now
            self._say(f"{text}, {duration_text(now - self._began)} so far")

    def clear(self) -> None:
        """Remove the line from a terminal. The next `show` begins anew."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._began = self._line_at = self._clock()

    def _draw(self, text: str, now: float) -> None:
        if self._bar is None:
            self._bar = _make_bar(bar_format="{desc}")
        elif now - self._line_at < _REDRAW_SECONDS:
            return
        self._line_at = now
        self._bar.set_description_str(f"{text}, {duration_text(now - self._began)} so far")


@contextlib.contextmanager
def watched(status: Status, text: str) -> Iterator[None]:
    """Show what this thread is doing, from another one, until the end of the block, so that its work may be timed.

    Args:
        status: nothing else may use it meanwhile.
        text: what to show.
    """
    ended = threading.Event()

    def show() -> None:
        while not ended.wait(_WATCH_SECONDS):
            status.show(text)
        status.clear()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def bytes_text(count: float) -> str:
    """Return a number of bytes with a binary unit, such as `1.4 GiB`."""
    size, unit = float(count), 0
    while abs(size) >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{size:.0f} {_UNITS[unit]}"


def duration_text(seconds: float) -> str:
    """Return a duration in at most two units, such as `19 s` or `3 min 20 s`."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
