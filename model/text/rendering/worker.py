"""The process that compiles and renders templates, within limits of the operating system.

`model.text.rendering.renderer` starts it as `python -m model.text.rendering.worker`; it is a helper process
(`model.helper_process`), and its tasks are those of `model.text.rendering.protocol`.

Before the first task it gives up what rendering does not need: it can open no file and no socket, since it may have no
further descriptor; it can start no process (except as root) and take no more memory than its limit. A template that
got past Jinja's sandbox would still meet an audit hook, which refuses every operation that Python reports.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import json
import sys
from typing import TYPE_CHECKING, Any, Final

import jinja2

from model.helper_process import child
from model.text.rendering.marks import alternatives
from model.text.rendering.protocol import (
    COMPILE,
    MAX_MESSAGE,
    MEMORY_BYTES,
    Kind,
)
from model.text.rendering.sandbox import (
    TemplateEnvironment,
    TemplateLimitError,
    TemplateRefusalError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

# What Jinja's filters import when they are first used.
_IMPORTED_LATE: Final = ("html", "pprint", "textwrap")
# Reported by Python itself during a rendering: a warning looks for its place, `id` for a number.
_HARMLESS: Final = frozenset(("builtins.id", "sys._getframe", "sys._getframemodulename"))
_COMPILING: Final = _HARMLESS | {"code.__new__", "compile", "exec"}


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

    def answer(self, task: bytes) -> bytes:
        """Do a task and return the reply."""
        try:
            kind, text = self._do(task)
            return bytes([kind]) + text.encode("utf-8", "surrogatepass")
        except MemoryError:
            message = f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"
            return bytes([Kind.MEMORY]) + message.encode()
        finally:
            self._permitted = None

    def _do(self, task: bytes) -> tuple[Kind, str]:
        try:
            order, *given = json.loads(task.decode("utf-8", "surrogatepass"))
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

    def audit(self, event: str, _: tuple[Any, ...]) -> None:
        """Refuse what a template may not do."""
        if self._permitted is not None and event not in self._permitted:
            raise jinja2.exceptions.SecurityError(f"a template may not do this: {event}")


def main() -> None:
    """Give up what is not needed, and answer tasks."""
    child.limit(MEMORY_BYTES)
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    _Template("{% for m in x %}{{ m | tojson }}{{ strftime_now('%c') }}{% endfor %}", {}).render(
        {"x": [{}]}, (0, 0, "UTC")
    )
    gc.collect()
    gc.freeze()
    child.read_config()
    child.seal()
    worker = _Worker()
    sys.addaudithook(worker.audit)
    child.serve(worker.answer)


def _text(error: object) -> str:
    """Return the text of an error, cut; an error of a template may have any, or none."""
    try:
        return str(error)[:MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - the error has values of the template
        return ""


if __name__ == "__main__":
    main()
