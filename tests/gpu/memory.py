"""Shares a GPU's memory among test processes: a test starts when the memory it needs is free.

Each byte of a lock file represents one GiB of the GPU. A test locks one byte per GiB, so concurrent tests never
need more memory than the GPU has. The operating system releases the locks of a process that ends.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

with contextlib.suppress(ImportError):  # not available on Windows, where the GPU kernels do not run
    import fcntl

GIB = 2**30
DEFAULT_GIB = 4
"""Enough for a CUDA context, the kernels and the tensors of most tests."""
WAIT_SECONDS = 900.0
OTHERS_SECONDS = 30.0
_QUEUE, _FIRST = 0, 1
"""Offset of the byte that the first process in the queue locks, and of the first byte that represents memory."""


class NotFreeError(Exception):
    """The memory that a test needs did not become free."""


class GPUMemory:
    """The memory of one GPU, shared with other processes through a lock file.

    Args:
        path: lock file; all processes on a GPU use the same one.
        total_gib: memory that all tests together may use.
        free_bytes: returns the free memory of the device, which other programs may use too.
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
        """Release the memory and close the file. Locks belong to the process, so it has one `GPUMemory` at a time."""
        self._held.clear()
        self._file.close()

    def take(self, gib: int | None) -> None:
        """Wait until `gib` GiB are free and keep other tests from using them.

        Processes wait in a queue, so that tests that need little memory cannot starve one that needs much.

        Args:
            gib: at most `total_gib`; None locks all of it without checking how much is free.

        Raises:
            NotFreeError: the memory did not become free in time.
        """
        count = self.total_gib if gib is None else gib
        needed = 0 if gib is None else gib * GIB
        try:
            self._wait(lambda: self._lock(_QUEUE), "the front of the queue", self._wait_seconds)
            self._wait(lambda: self._lock_memory(count), "other tests", self._wait_seconds)
            # Memory of other tests is free by now; whatever is still in use belongs to other programs.
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
