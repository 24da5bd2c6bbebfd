"""Shares a GPU's memory among test processes: a test starts when what it needs is free.

Each byte of a lock file stands for a GiB of the GPU. A test locks as many bytes as it needs, so the tests that run at a
time never need more than there is. The system releases the locks of a process that ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

with contextlib.suppress(ImportError):  # Windows lacks it, and our GPU kernels
    import fcntl

GIB = 2**30
DEFAULT_GIB = 4
"""For a CUDA context, the kernels, and the tensors of most tests."""
WAIT_SECONDS = 900.0
OTHERS_SECONDS = 30.0
_QUEUE, _FIRST = 0, 1
"""Offset of the byte that the first process in the queue locks, and of the first byte that represents memory."""


class NotFreeError(Exception):
    """The memory that a test needs did not become free."""


class GPUMemory:
    """The memory of one GPU as this process sees it.

    Args:
        path: of the lock file; all processes on a GPU use the same.
        total_gib: that tests may use together.
        free_bytes: asks the device how much is free now, whoever uses the rest.
        wait_seconds: how long `take` waits for other tests.
    """

    def __init__(
        self,
        path: Path,
        total_gib: int,
        free_bytes: Callable[[], int],
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.total_gib = total_gib
        self._free_bytes, self._wait_seconds = free_bytes, wait_seconds
        self._file = path.open("wb")
        self._held: list[int] = []

    @property
    def is_held(self) -> bool:
        """Whether this process has taken memory and not released it."""
        return bool(self._held)

    def close(self) -> None:
        """Release what is held, and the file; a process has one `GPUMemory` at a time, as locks are a process's."""
        self._held.clear()
        self._file.close()

    def take(self, gib: int | None) -> None:
        """Wait until `gib` GiB are free and keep other tests from using them.

        Processes wait in a queue, so that tests that need little memory cannot starve one that needs much.

        Args:
            gib: at most `total_gib`; None for all that other tests could use, however much of it is free.

        Raises:
            NotFreeError: they did not become free in time.
        """
        count = self.total_gib if gib is None else gib
        needed = 0 if gib is None else gib * GIB
        try:
            self._wait(lambda: self._lock(_QUEUE), "the front of the queue", self._wait_seconds)
            self._wait(lambda: self._lock_memory(count), "other tests", self._wait_seconds)
            # What other tests held is free at once; what is left is another program's.
            self._wait(
                lambda: self._free_bytes() >= needed,
                "other programs",
                min(self._wait_seconds, OTHERS_SECONDS),
            )
        except NotFreeError as error:
            self.release()
            raise NotFreeError(f"{count} GiB of GPU memory are needed; {error}") from None
        finally:
            self._unlock(_QUEUE)

    def release(self) -> None:
        """Let others use what this process held."""
        while self._held:
            self._unlock(self._held.pop())

    def _lock_memory(self, count: int) -> bool:
        for byte in range(_FIRST, _FIRST + self.total_gib):
            if len(self._held) < count and byte not in self._held and self._lock(byte):
                self._held.append(byte)
        return len(self._held) == count

    def _wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                free = self._free_bytes() / GIB
                raise NotFreeError(f"waited {seconds:.0f} s for {what}, {free:.1f} GiB are free")
            time.sleep(0.05)

    def _lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError:
            return False
        return True

    def _unlock(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)
