"""Reads the PTX by which `kernels.step.gpu.grid_barrier` accesses memory."""

from __future__ import annotations

import dataclasses
import functools
import re

from tests.kernels.step.schedule.events import ScheduleError, require


@dataclasses.dataclass(frozen=True)
class Instruction:
    """What a piece of PTX does, and which thread does it; None for every thread."""

    kind: str
    thread: int | None = None
    order: str = ""
    fence: int | None = None


@functools.cache
def instruction(code: str) -> Instruction:
    """Read the instructions of `grid_barrier`.

    Raises:
        ScheduleError: the code accesses memory in another way.
    """
    threads: dict[str, tuple[str, int]] = {}
    found: list[tuple[str, str]] = []
    skipping: list[str] = []
    for statement in re.split(r"[;{}]", code):
        words = " ".join(statement.split()).removeprefix("again: ").removeprefix("done:").strip()
        guard = ""
        if words.startswith("@"):
            guard, words = words[1:].split(" ", 1)
        if compared := re.fullmatch(r"setp\.(eq|ne)\.u32 (\w+), thread, (\d+)", words):
            threads[compared[2]] = compared[1], int(compared[3])
        elif words == "bra done" and threads.get(guard, ("",))[0] == "ne":
            skipping.append(guard)
        elif re.match(r"(ld|st|red|atom|fence|membar|bar)\b", words):
            found.append((guard or (skipping[-1] if skipping else ""), words))
    thread = {guard: threads[guard][1] for guard, _ in found if guard in threads}
    guards = [guard for guard, _ in found]
    shape = tuple(words.split(" ")[0] for _, words in found)
    if len(shape) == 1 and (added := re.fullmatch(r"red\.(\w+)\.gpu\.global\.add\.u32", shape[0])):
        require(found[0][1].endswith("[$1], 1"), f"another addition: {found[0][1]}")
        return Instruction("arrive", thread[guards[0]], added[1])
    if shape and (load := re.fullmatch(r"ld\.(\w+)\.gpu\.global\.u32", shape[-1])):
        require("setp.lt.u32 early, seen, $2" in code and "@early bra again" in code, "no wait")
        fence = None
        if len(shape) == 2:
            require(shape[0] == "fence.acq_rel.gpu", f"unknown instruction {shape[0]}")
            fence = thread[guards[0]]
        return Instruction("wait", thread[guards[-1]], load[1], fence)
    if len(shape) == 1 and re.fullmatch(r"ld\.relaxed\.gpu\.global\.(v2\.)?b32", shape[0]):
        return Instruction("poll")
    if len(shape) == 1 and re.fullmatch(r"st\.relaxed\.gpu\.global\.b(16|32)", shape[0]):
        return Instruction("store", order="relaxed")
    raise ScheduleError(f"unknown instructions {shape}")
