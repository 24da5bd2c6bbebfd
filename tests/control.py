"""A control for tests of promised times: how slow the machine itself is meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Final, Self

SLEEP_SECONDS: Final = 0.02
WORK_SECONDS: Final = 0.001
_LATE: Final = 10
"""Times that what is measured may wait for a processor as long as the control once did."""


class Control:
    """Context manager that runs a process which works for a millisecond of processor time, again and again.

    A promise is judged by `allowed(seconds)` after the block: the promised time as long as the machine is idle, and
    more if the control, which does nothing else, had to wait for a processor.
    """

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, *exception: object) -> None:
        output, _ = self._process.communicate(b"")
        self._ratio, self._worst = json.loads(output)

    def allowed(self, seconds: float) -> float:
        """Return the seconds that what is promised in `seconds` may have taken during the block."""
        return seconds * self._ratio + _LATE * self._worst


def main() -> None:
    """Work until standard input ends; print wall time per processor time, and the longest delay in seconds."""
    import select

    sys.stdout.write("\n")
    sys.stdout.flush()
    wall = processor = SLEEP_SECONDS
    worst = 0.0
    while True:
        began = time.monotonic()
        ended = bool(select.select([sys.stdin], [], [], SLEEP_SECONDS)[0])
        worked = time.thread_time()
        while time.thread_time() - worked < WORK_SECONDS:
            pass
        took, needed = time.monotonic() - began, SLEEP_SECONDS + WORK_SECONDS
        wall, processor, worst = wall + took, processor + needed, max(worst, took - needed)
        if ended:
            break
    sys.stdout.write(json.dumps([max(1.0, wall / processor), max(0.0, worst)]))


if __name__ == "__main__":
    main()
