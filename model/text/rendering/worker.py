"""The process that compiles and renders templates, within limits of the operating system.

`model.text.rendering.renderer` starts it as `python -m model.text.rendering.worker`, with a socket as standard input
and output. It answers one task after the other (`model.text.rendering.protocol`), and ends when the socket is closed or
a task has taken all its processor time (SIGPROF).

Before the first task it gives up what rendering does not need: it can open no file and no socket, since it may have no
further descriptor; it can start no process (except as root) and take no more memory than its limit. A template that
got past Jinja's sandbox would still meet an audit hook, which refuses every operation that Python reports.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import jinja2

from model.device.niceness import give_way
from model.text.rendering.helper_process import HEADER
from model.text.rendering.marks import alternatives
from model.text.rendering.protocol import (
    COMPILE,
    MAX_MESSAGE,
    MEMORY_BYTES,
    REPLY,
    Kind,
)
from model.text.rendering.sandbox import (
    TemplateEnvironment,
    TemplateLimitError,
    TemplateRefusalError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIMITS: Final = {
    "RLIMIT_AS": MEMORY_BYTES,
    "RLIMIT_DATA": MEMORY_BYTES,
    "RLIMIT_CORE": 0,
    "RLIMIT_FSIZE": 0,
    "RLIMIT_NPROC": 0,
    "RLIMIT_NOFILE": 0,  # the descriptors that are open stay so
}
_SIGNALS: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
)
_NO_NEW_PRIVILEGES: Final = 38
# What Jinja's filters import when they are first used.
_IMPORTED_LATE: Final = ("html", "pprint", "textwrap")
# Reported by Python itself during a rendering: a warning looks for its place, `id` for a number.
_HARMLESS: Final = frozenset(("builtins.id", "sys._getframe", "sys._getframemodulename"))
_COMPILING: Final = _HARMLESS | {"code.__new__", "compile", "exec"}
_INPUT: Final = 0
_OUTPUT: Final = 1
_FIRST_BYTES: Final = 1 << 16
_MORE_BYTES: Final = 1 << 20


class _Template:
    """A compiled template and its environment."""

    def __init__(self, source: str, marks: dict[str, str]) -> None:
        find = alternatives(marks)
        self._environment = TemplateEnvironment(
            lambda text: find.sub(lambda found: marks[found[0]], text)
        )
        self._template = self._environment.compile_template(source)

    def render(self, variables: dict[str, Any], now: Sequence[Any]) -> str:
        seconds, offset, name = now
        zone = datetime.timezone(datetime.timedelta(seconds=offset), name)
        self._environment.now = datetime.datetime.fromtimestamp(seconds, zone)
        return self._environment.render(self._template, variables)


class _Worker:
    """Owns the compiled templates by key."""

    def __init__(self) -> None:
        self._templates: dict[str, _Template] = {}
        self._permitted: frozenset[str] | None = None

    def run(self) -> None:
        """Answer tasks until the socket is closed."""
        sys.addaudithook(self._audit)
        while task := _read():
            # That of the process is imprecise while its timer runs.
            began = time.thread_time()
            kind, text = self._answer(task)
            microseconds = int((time.thread_time() - began) * 1e6)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(HEADER.pack(REPLY.size + len(text)) + REPLY.pack(kind, microseconds), text)

    def _answer(self, task: bytes) -> tuple[Kind, bytes]:
        try:
            kind, text = self._do(task)
            return kind, text.encode("utf-8", "surrogatepass")
        except MemoryError:
            return Kind.MEMORY, f"it needs more than {MEMORY_BYTES >> 20} MiB of memory".encode()
        finally:
            self._permitted = None

    def _do(self, task: bytes) -> tuple[Kind, str]:
        try:
            order, seconds, *given = json.loads(task.decode("utf-8", "surrogatepass"))
            signal.setitimer(signal.ITIMER_PROF, seconds)
            if order == COMPILE:
                self._permitted = _COMPILING
                key, source, marks = given
                self._templates[key] = _Template(source, marks)
                return Kind.TEXT, ""
            self._permitted = _HARMLESS
            key, variables, now = given
            return Kind.TEXT, self._templates[key].render(variables, now)
        except TemplateRefusalError as error:
            return Kind.REFUSAL, _text(error)
        except TemplateLimitError as error:
            return Kind.LIMIT, _text(error)
        except MemoryError:
            raise
        except jinja2.TemplateSyntaxError as error:
            return Kind.INVALID, f"line {error.lineno}: {_text(error.message)}"
        # A template can fail in any way that an expression can.
        except Exception as error:  # noqa: BLE001 - see above
            kind = Kind.INVALID if self._permitted is _COMPILING else Kind.FAILURE
            return kind, f"{type(error).__name__}: {_text(error)}"

    def _audit(self, event: str, _: tuple[Any, ...]) -> None:
        if self._permitted is not None and event not in self._permitted:
            raise jinja2.exceptions.SecurityError(f"a template may not do this: {event}")


def main() -> None:
    """Give up what is not needed, and answer tasks."""
    give_way()
    for (
        number
    ) in _SIGNALS:  # go to all processes of a service; the parent decides when this one ends
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    _Template("{% for m in x %}{{ m | tojson }}{{ strftime_now('%c') }}{% endfor %}", {}).render(
        {"x": [{}]}, (0, 0, "UTC")
    )
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()
    for name, value in _LIMITS.items():
        if (kind := getattr(resource, name, None)) is not None:
            _, hard = resource.getrlimit(kind)
            limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (limit, limit))
    _Worker().run()


def _text(error: object) -> str:
    """Return the text of an error, cut; an error of a template may have any, or none."""
    try:
        return str(error)[:MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - the error has values of the template
        return ""


def _read() -> bytes:
    """Return the next task, none if the socket was closed. Nothing follows it, so what is there may be read at once."""
    received = os.read(_INPUT, _FIRST_BYTES)
    while 0 < len(received) < HEADER.size:
        received += os.read(_INPUT, _FIRST_BYTES)
    if not received:
        return b""
    (size,) = HEADER.unpack_from(received)
    if len(received) == HEADER.size + size:
        return received[HEADER.size :]
    parts = [received[HEADER.size :]]
    left = size - len(parts[0])
    while left:
        parts.append(os.read(_INPUT, min(left, _MORE_BYTES)))
        if not parts[-1]:
            return b""
        left -= len(parts[-1])
    return b"".join(parts)


def _write(*parts: bytes) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        written = os.writev(_OUTPUT, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


if __name__ == "__main__":
    main()
