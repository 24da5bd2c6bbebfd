"""Compiles and renders templates in helper processes, which `RENDERERS` owns; all templates of a process share them.

A rendering is a task for a process that runs already, so it costs a round trip of 0.1 ms. If that process is busy for
longer than a moment, another one is started, so that a conversation that takes long does not delay the others.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from model.errors import ModelError
from model.helper_process.command import module_command
from model.helper_process.pool import HelperPool
from model.helper_process.process import (
    CrashError,
    HelperProcess,
    LostError,
    ProcessorTimeError,
)
from model.helper_process.steps import run_in_thread, run_on_loop
from model.text.rendering.protocol import COMPILE, RENDER, SECONDS, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model.helper_process.steps import Steps

MOST_PROCESSES: Final = 4
BUSY_SECONDS: Final = 0.05
"""How long a task waits for a process before another one is started."""
_KEPT_MEMORY: Final = 96 << 20
"""Resident memory with which a process is not used again."""
_LONG_SECONDS: Final = 0.02
"""Time of a compilation and a task after which the memory of their process is read."""
_MOST_TEMPLATES: Final = 64
"""Templates that a process compiles before another one takes its place."""
_COMMAND: Final = module_command("model.text.rendering.worker")


class TemplateInvalidError(Exception):
    """The template cannot be compiled."""


class TemplateRefusalError(Exception):
    """The template called `raise_exception`; the message is the template's."""


class TemplateFailureError(Exception):
    """An expression of the template failed; the message begins with the type of the error."""


class TemplateLimitError(Exception):
    """A limit was reached; the message names it."""


class RenderingUnavailableError(ModelError):
    """No process could complete the task, which says nothing about the template or the conversation."""


RENDERING_ERRORS: Final = (TemplateRefusalError, TemplateFailureError, TemplateLimitError)
"""What a rendering can say of its conversation."""


class Allowance:
    """Processor time that is left to a series of tasks.

    Args:
        seconds: for all of them.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._total = self._left = seconds

    @property
    def seconds(self) -> float:
        """What the next task may take.

        Raises:
            TemplateLimitError: nothing is left.
        """
        if self._left <= 0:
            raise TemplateLimitError(self.describe(self._left))
        return min(self._left, SECONDS)

    def describe(self, seconds: float) -> str:
        """Return the limit of a task that had these seconds: its own, or that of the series if less was left."""
        limit = seconds if seconds >= SECONDS else self._total
        return f"it takes more than {limit:g} s of processor time"

    def charge(self, seconds: float) -> None:
        """Subtract what a task took."""
        self._left -= seconds


@dataclass(frozen=True)
class Program:
    """A template as it is compiled.

    Attributes:
        source: Jinja source.
        marks: texts that are replaced in its literals.
        key: names it in messages to the processes.
    """

    source: str
    marks: Mapping[str, str] = field(default_factory=dict)
    key: str = field(init=False)

    def __post_init__(self) -> None:
        """Compute the key."""
        content = _encode([self.source, dict(self.marks)])
        object.__setattr__(self, "key", hashlib.sha256(content).hexdigest())


class Renderers:
    """Owns up to `MOST_PROCESSES` processes, which start when they are needed. Thread-safe."""

    def __init__(self) -> None:
        self._pool = HelperPool(
            "a process that renders chat templates", most=MOST_PROCESSES, busy_seconds=BUSY_SECONDS
        )

    def compile(self, program: Program, allowance: Allowance) -> None:
        """Compile a template.

        Raises:
            TemplateInvalidError: it is not valid.
            TemplateLimitError: it is too long, or takes too much time or memory.
            RenderingUnavailableError: no process could do it.
        """
        run_in_thread(self._run(program, b"", allowance))

    def render(
        self, program: Program, variables: Mapping[str, object], allowance: Allowance
    ) -> str:
        """Render a template; the thread waits.

        Args:
            program: the template.
            variables: plain JSON values by name.
            allowance: of processor time.

        Raises:
            TemplateRefusalError: the template refused its input.
            TemplateFailureError: an expression failed, or the variables are not such values.
            TemplateLimitError: it takes too much time or memory, or its text is too long.
            RenderingUnavailableError: no process could do it.
        """
        return self.do(program, rendering(program, variables), allowance)

    def do(self, program: Program, task: bytes, allowance: Allowance) -> str:
        """Do a task of `rendering`; otherwise like `render`."""
        return run_in_thread(self._run(program, task, allowance))

    async def render_on_loop(self, program: Program, task: bytes, allowance: Allowance) -> str:
        """Do a task of `rendering`; the event loop does other work meanwhile."""
        return await run_on_loop(self._run(program, task, allowance))

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        return self._pool.pids

    def end(self) -> None:
        """End all processes. A rendering that still runs fails; a later one starts a new process."""
        self._pool.end()

    def _run(self, program: Program, task: bytes, allowance: Allowance) -> Steps[str]:
        """Do a task, or only compile the template if there is none."""
        work = functools.partial(_work, program, task, allowance)
        try:
            return (yield from self._pool.run(lambda: HelperProcess(_COMMAND), work))
        except CrashError as error:
            raise TemplateLimitError(f"two processes {error}") from None
        except LostError as error:
            raise RenderingUnavailableError(
                f"no process could render the chat template: it {error}"
            ) from None


def rendering(program: Program, variables: Mapping[str, object]) -> bytes:
    """Return the task to render a template, at this time.

    Raises:
        TemplateFailureError: the variables are not plain JSON values.
    """
    now = datetime.datetime.now().astimezone()
    offset = now.utcoffset() or datetime.timedelta()
    zone = (now.timestamp(), offset.total_seconds(), now.tzname() or "")
    try:
        return _encode([RENDER, program.key, variables, zone])
    except (ValueError, TypeError, RecursionError) as error:
        raise TemplateFailureError(f"{type(error).__name__}: {error}") from None


def _work(
    program: Program, task: bytes, allowance: Allowance, process: HelperProcess, is_new: bool
) -> Steps[str]:
    """Compile a template if the process does not have it, and do a task; close a process that has become large."""
    templates, start = process.notes, time.monotonic()
    try:
        if program.key not in templates:
            its = Allowance() if task else allowance
            order = _encode([COMPILE, program.key, program.source, dict(program.marks)])
            yield from _ask(process, order, its, is_new=is_new)
            templates.add(program.key)
        return (yield from _ask(process, task, allowance, is_new=is_new)) if task else ""
    finally:
        is_long = time.monotonic() - start > _LONG_SECONDS
        if len(templates) >= _MOST_TEMPLATES or (is_long and _memory(process.pid) > _KEPT_MEMORY):
            process.close()


def _ask(process: HelperProcess, task: bytes, allowance: Allowance, *, is_new: bool) -> Steps[str]:
    seconds = allowance.seconds
    try:
        reply = yield from process.ask(task, seconds)
    except ProcessorTimeError:
        raise TemplateLimitError(allowance.describe(seconds)) from None
    kind = Kind(reply.content[0])
    allowance.charge(reply.seconds)
    if kind is Kind.MEMORY and not is_new:
        process.close()
        raise CrashError("had less memory than a new one")
    text = str(memoryview(reply.content)[1:], "utf-8", "surrogatepass")
    if kind is Kind.TEXT:
        return text
    raise _ERRORS[kind](text)


def _memory(pid: int | None) -> int:
    """Return the resident memory of a process in bytes; 0 without one, and where the system does not tell."""
    if pid is None:
        return 0
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


_ERRORS: Final = {
    Kind.INVALID: TemplateInvalidError,
    Kind.REFUSAL: TemplateRefusalError,
    Kind.FAILURE: TemplateFailureError,
    Kind.LIMIT: TemplateLimitError,
    Kind.MEMORY: TemplateLimitError,
}


def _encode(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


RENDERERS: Final = Renderers()
"""Those of this process."""
