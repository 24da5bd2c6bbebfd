"""Runs a fuzzing target in a child process that may crash or hang, and stores the cases that made it do so.

The child writes each case to a file that both processes map into memory before it runs the case. If the child dies, or
does not come to the next case within the time limit, the parent stores the case from there.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.reliability.fuzz.target import Target

_MAP_BYTES = 16 << 20
_HEADER = struct.Struct("QQ")  # number of cases begun, length of the current one
_POLL_SECONDS = 0.25
_MEMORY_BYTES = 6 << 30
_TAIL = 3000


class Finding(NamedTuple):
    """A case that broke the target.

    Attributes:
        kind: the exception and where it was raised, or how the process ended.
        file: the case, beside a file with the details.
    """

    kind: str
    file: Path


class _Slot:
    """The current case, in memory that the parent and the child share."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _MAP_BYTES)

    def begin(self, number: int, case: bytes) -> None:
        case = case[: _MAP_BYTES - _HEADER.size]
        self._memory[_HEADER.size : _HEADER.size + len(case)] = case
        self._memory[: _HEADER.size] = _HEADER.pack(number, len(case))

    def read(self) -> tuple[int, bytes]:
        number, length = _HEADER.unpack(self._memory[: _HEADER.size])
        return number, self._memory[_HEADER.size : _HEADER.size + length]


def run_child(target: Target, slot: str, seed: int, folder: Path) -> None:
    """Make and check cases until the parent ends this process.

    Args:
        target: the target.
        slot: file of the current case.
        seed: decides all cases.
        folder: for the cases that raise; one for each kind of exception.
    """
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    rng = random.Random(seed)
    current = _Slot(Path(slot))
    number = 0
    while os.getppid() != 1:
        case = target.make(rng)
        number += 1
        current.begin(number, case)
        try:
            target.check(case)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - Rust's panics are no `Exception`
            store(folder, describe(error), case, "".join(traceback.format_exception(error)))


def describe(error: BaseException) -> str:
    """Name an exception and the innermost place in our code that raised it or let it pass."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f for f in frames if "site-packages" not in f.filename and "/lib/python" not in f.filename
    ]
    frame = (ours or list(frames))[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} ({frame.name})"


def store(folder: Path, kind: str, case: bytes, details: str) -> None:
    """Store a case unless one of the same kind is there."""
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(kind.encode()).hexdigest()[:12]
    if not (folder / f"{name}.txt").exists():
        (folder / f"{name}.case").write_bytes(case)
        (folder / f"{name}.txt").write_text(f"{kind}\n\n{details}", errors="backslashreplace")


def findings(folder: Path) -> list[Finding]:
    """List what `store` has stored."""
    return [
        Finding(file.read_text().partition("\n")[0], file.with_suffix(".case"))
        for file in sorted(folder.glob("*.txt"))
    ]


def fuzz(name: str, seconds: float, seed: int, hang_seconds: float, folder: Path) -> int:
    """Run a target for a time, in one child after another.

    Args:
        name: of the target.
        seconds: for which to run.
        seed: of the first child; each further one has the next.
        hang_seconds: a case that takes longer is a finding.
        folder: for the findings.

    Returns:
        The number of cases.
    """
    total = 0
    end = time.monotonic() + seconds
    with tempfile.NamedTemporaryFile(prefix="fuzz-") as file:
        file.truncate(_MAP_BYTES)
        while time.monotonic() < end:
            total += _run_one(name, Path(file.name), seed, hang_seconds, folder, end)
            seed += 1
    return total


def _run_one(
    name: str, slot_file: Path, seed: int, hang_seconds: float, folder: Path, end: float
) -> int:
    slot = _Slot(slot_file)
    slot.begin(0, b"")
    command = [sys.executable, "-m", "tests.reliability.fuzz", name, "--child", str(slot_file)]
    command += [f"--seed={seed}", f"--findings={folder}"]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            reason, number = _watch(child, slot, hang_seconds, end)
        finally:
            child.kill()
            child.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")[-_TAIL:]
    if reason is not None:
        store(folder, reason, slot.read()[1], text)
        print(f"seed {seed}, case {number}: {reason}", flush=True)
        if not number:
            raise SystemExit(f"the target does not start:\n{text}")
    return number


def _watch(
    child: subprocess.Popen[bytes], slot: _Slot, hang_seconds: float, end: float
) -> tuple[str | None, int]:
    """Return how the child broke, or None if the time is over, and the number of its cases."""
    last, since = -1, time.monotonic()
    while time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        number, _ = slot.read()
        if (code := child.poll()) is not None:
            return f"the process ended with code {code}", number
        now = time.monotonic()
        if number != last:
            last, since = number, now
        elif now - since > (hang_seconds if number else 60 + hang_seconds):
            return f"a case took more than {hang_seconds:.0f} s", number
    return None, slot.read()[0]
