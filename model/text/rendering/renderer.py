"""Compiles and renders templates in helper processes, which `RENDERERS` owns; all templates of a process share them.

A rendering is a task for a process that runs already, so it costs a round trip of 0.1 ms. If that process is busy for
longer than a moment, another one is started, so that a conversation that takes long does not delay the others.
A process that ends without a reason of the template's is no verdict: another one gets the same task.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from model.errors import ModelError
from model.text.rendering.helper_process import (
    HelperEndedError,
    HelperProcess,
    HelperTimeoutError,
    describe_code,
)
from model.text.rendering.protocol import (
    COMPILE,
    MOST_REPLY_BYTES,
    RENDER,
    REPLY,
    SECONDS,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MOST_PROCESSES: Final = 4
BUSY_SECONDS: Final = 0.05
"""How long a task waits for a process before another one is started."""
WALL_SECONDS: Final = 30.0
"""Time in which a process must answer. On a busy machine it may be many times the processor time."""
_ATTEMPTS: Final = 2
_KEPT_MEMORY: Final = 96 << 20
"""Resident memory with which a process is not used again."""
_LONG_SECONDS: Final = 0.02
"""Time of a task after which the memory of its process is read."""
_MOST_TEMPLATES: Final = 64
"""Templates that a process compiles before another one takes its place."""
_COMMAND: Final = (sys.executable, "-P", "-m", "model.text.rendering.worker")
# Without these, some interpreters do not start. No other variable is handed on.
_HANDED_ON: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME")
# Signals of a process that did something wrong itself, and is not killed by somebody else.
_OWN_FAULTS: Final = frozenset(
    -number
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
)


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


class _Task(NamedTuple):
    """An encoded task, and its limit of processor time."""

    content: bytes
    seconds: float


class Renderers:
    """Owns up to `MOST_PROCESSES` processes, which start when they are needed. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[_Renderer] = []
        self._all: set[_Renderer] = set()
        self._changed = threading.Condition()
        self._num_ends = 0

    def compile(self, program: Program, allowance: Allowance) -> None:
        """Compile a template.

        Raises:
            TemplateInvalidError: it is not valid.
            TemplateLimitError: it is too long, or takes too much time or memory.
            RenderingUnavailableError: no process could do it.
        """
        self._run(program, None, allowance)

    def render(
        self, program: Program, variables: Mapping[str, object], allowance: Allowance
    ) -> str:
        """Render a template.

        Args:
            program: the template.
            variables: plain JSON values by name.
            allowance: of processor time.

        Raises:
            TemplateRefusalError: the template refused its input.
            TemplateFailureError: an expression failed.
            TemplateLimitError: it takes too much time or memory, or its text is too long.
            RenderingUnavailableError: no process could do it.
        """
        now = datetime.datetime.now().astimezone()
        offset = now.utcoffset() or datetime.timedelta()
        zone = (now.timestamp(), offset.total_seconds(), now.tzname() or "")
        try:
            seconds = allowance.seconds
            task = _Task(_encode([RENDER, seconds, program.key, variables, zone]), seconds)
        except (ValueError, TypeError, RecursionError) as error:
            raise TemplateFailureError(f"{type(error).__name__}: {error}") from None
        return self._run(program, task, allowance)

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        with self._changed:
            return [pid for renderer in self._all if (pid := renderer.pid) is not None]

    def end(self) -> None:
        """End all processes. A rendering that still runs fails; a later one starts a new process."""
        with self._changed:
            processes, self._all, self._free = self._all, set(), []
            self._num_ends += 1
        for renderer in processes:
            renderer.kill()

    def _run(self, program: Program, task: _Task | None, allowance: Allowance) -> str:
        problem, code, num_ends = "", 0, self._num_ends
        for _ in range(_ATTEMPTS):
            if self._num_ends != num_ends:
                break
            with self._renderer() as renderer:
                try:
                    return renderer.run(program, task, allowance)
                except HelperEndedError as error:
                    problem = str(error)
                    code = error.code
                except HelperTimeoutError as error:
                    problem, code = str(error), 0
        if code in _OWN_FAULTS:
            raise TemplateLimitError(f"it ended two processes, with {describe_code(code)}")
        raise RenderingUnavailableError(f"no process could render the chat template: {problem}")

    @contextlib.contextmanager
    def _renderer(self) -> Iterator[_Renderer]:
        """Lend a process to one thread; it is not lent again if it ended."""
        renderer = self._take()
        try:
            yield renderer
        finally:
            with self._changed:
                if renderer in self._all and renderer.is_usable:
                    self._free.append(renderer)
                else:
                    self._all.discard(renderer)
                self._changed.notify()
            if not renderer.is_usable:
                renderer.kill()

    def _take(self) -> _Renderer:
        began = time.monotonic()
        with self._changed:
            while True:
                while self._free:
                    if (renderer := self._free.pop()).is_usable:
                        return renderer
                    self._all.discard(renderer)
                    renderer.kill()
                left = began + BUSY_SECONDS - time.monotonic()
                if not self._all or (left <= 0 and len(self._all) < MOST_PROCESSES):
                    self._all.add(renderer := _Renderer())
                    return renderer
                self._changed.wait(left if len(self._all) < MOST_PROCESSES else None)


class _Renderer:
    """Owns a process, which starts with its first task. Only `kill` may be called by a second thread.

    Attributes:
        is_usable: whether it may be given another task.
    """

    def __init__(self) -> None:
        self._helper: HelperProcess | None = None
        self._templates: set[str] = set()
        self._is_new = True
        self._ended = False

    @property
    def is_usable(self) -> bool:
        """Whether it may be given another task."""
        if self._ended or len(self._templates) >= _MOST_TEMPLATES:
            return False
        return self._helper is None or self._helper.is_usable

    @property
    def pid(self) -> int | None:
        """The process's id; None if it does not run."""
        helper = self._helper
        return helper.pid if helper is not None and helper.is_usable else None

    def run(self, program: Program, task: _Task | None, allowance: Allowance) -> str:
        """Compile a template if the process does not have it, and do a task.

        Raises:
            HelperEndedError: the process ended.
            HelperTimeoutError: it did not answer in time.
            RenderingUnavailableError: it cannot be started.
            Exception: as `Renderers.render`.
        """
        try:
            return self._run(program, task, allowance)
        except _LessMemoryError:
            self._stop()
            return self._run(program, task, allowance)

    def kill(self) -> None:
        """End the process, and start no other one."""
        self._ended = True
        self._stop()

    def _run(self, program: Program, task: _Task | None, allowance: Allowance) -> str:
        helper = self._helper
        if helper is None:
            helper = self._helper = _start()
        if self._ended:  # meanwhile, by another thread
            helper.kill()
            raise HelperEndedError(-signal.SIGKILL)
        if program.key not in self._templates:
            own = allowance if task is None else Allowance()
            order = [COMPILE, own.seconds, program.key, program.source, dict(program.marks)]
            was_new = self._is_new
            self._ask(helper, _Task(_encode(order), own.seconds), own)
            self._templates.add(program.key)
            self._is_new = was_new
        return "" if task is None else self._ask(helper, task, allowance)

    def _ask(self, helper: HelperProcess, task: _Task, allowance: Allowance) -> str:
        is_first, self._is_new = self._is_new, False
        began = time.monotonic()
        try:
            reply = helper.ask(task.content, WALL_SECONDS)
        except HelperEndedError as error:
            if error.code == -signal.SIGPROF:
                raise TemplateLimitError(allowance.describe(task.seconds)) from None
            raise
        kind, microseconds = REPLY.unpack_from(reply)
        if kind == Kind.MEMORY and not is_first:
            raise _LessMemoryError
        if time.monotonic() - began > _LONG_SECONDS and _memory(helper.pid) > _KEPT_MEMORY:
            self.kill()
        allowance.charge(microseconds / 1e6)
        text = reply[REPLY.size :].decode("utf-8", "surrogatepass")
        if kind == Kind.TEXT:
            return text
        raise _ERRORS[Kind(kind)](text)

    def _stop(self) -> None:
        helper, self._helper = self._helper, None
        self._templates.clear()
        self._is_new = True
        if helper is not None:
            helper.kill()


def _memory(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 where the system does not tell."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class _LessMemoryError(Exception):
    """A task did not find enough memory in a process that has done others before."""


_ERRORS: Final = {
    Kind.INVALID: TemplateInvalidError,
    Kind.REFUSAL: TemplateRefusalError,
    Kind.FAILURE: TemplateFailureError,
    Kind.LIMIT: TemplateLimitError,
    Kind.MEMORY: TemplateLimitError,
}


def _start() -> HelperProcess:
    handed_on = os.environ  # noqa: TID251 - handed on, not read
    environment = {name: handed_on[name] for name in _HANDED_ON if name in handed_on}
    try:
        environment["PYTHONPATH"] = os.pathsep.join(_module_path())
        return HelperProcess(_COMMAND, environment, MOST_REPLY_BYTES)
    except OSError as error:
        raise RenderingUnavailableError(
            f"the process that renders chat templates cannot be started: {error}"
        ) from None


def _module_path() -> list[str]:
    """Return where this process finds modules, without the working directory, where anybody may put a `json.py`."""
    ours = str(Path(__file__).resolve().parents[__name__.count(".")])
    others = {"", str(Path.cwd())} - {ours}
    return list(dict.fromkeys([*(path for path in sys.path if path not in others), ours]))


def _encode(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


RENDERERS: Final = Renderers()
"""Those of this process."""
atexit.register(RENDERERS.end)
