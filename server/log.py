"""Log format of all processes of the service: lines for people, or a JSON object per line."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, TextIO, TypeAlias

import msgspec

from server.standard_error import StandardError, drain

LogFormat: TypeAlias = Literal["text", "json"]

_HUB_REPLIES = "huggingface_hub.utils._http"
_encode = msgspec.json.Encoder(enc_hook=str).encode
_LAST_SECONDS = 0.5
_is_plain = re.compile(r"[A-Za-z0-9._:/@+,;~%{}*-]+").fullmatch


def quoted(value: str) -> str:
    """Return text from outside as a value of a line of text.

    Anything but plain characters is quoted and escaped as in JSON, with only ASCII, so that the value can contain
    neither a line break nor another field.
    """
    return value if _is_plain(value) else json.dumps(value)


def configure_logging(level: str, log_format: LogFormat = "text", suffix: str = "") -> None:
    """Write the log messages of this process to standard error.

    Args:
        level: name of a logging level.
        log_format: of each line.
        suffix: of the names of loggers, to tell processes apart.
    """
    handler = _Handler(sys.stderr)
    formatter = _JsonFormatter if log_format == "json" else _TextFormatter
    handler.setFormatter(formatter())
    if isinstance(sys.stderr, StandardError):
        sys.stderr.notice = functools.partial(_dropped_lines, formatter(), suffix)
    if suffix:
        handler.addFilter(functools.partial(_append_to_name, suffix))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # No format shows them, and finding them out takes longer than formatting a line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.logAsyncioTasks = False  # type: ignore[attr-defined] # from Python 3.12 on
    quiet_libraries()


def _dropped_lines(formatter: logging.Formatter, suffix: str, count: int) -> str:
    """Render the line that reports dropped lines; see `StandardError.notice`."""
    name, text = (
        f"tessera{suffix}",
        "%d lines of the log were dropped here: they could not be written",
    )
    record = logging.LogRecord(name, logging.WARNING, __file__, 0, text, (count,), None)
    return f"{formatter.format(record)}\n"


def quiet_libraries() -> None:
    """Log only problems of the libraries that fetch models: neither requests nor the advice to log in."""
    for chatty in ("httpx", "httpx2", "httpcore", "urllib3", "huggingface_hub", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger(_HUB_REPLIES).addFilter(_is_problem)


def _append_to_name(suffix: str, record: logging.LogRecord) -> bool:
    record.name += suffix
    return True


def _is_problem(record: logging.LogRecord) -> bool:
    """Whether a warning that the Hugging Face Hub sent is about a problem: a public model needs no token."""
    return "unauthenticated requests" not in record.getMessage()


@contextlib.contextmanager
def written_together() -> Iterator[None]:
    """Write the messages that are logged in this block with one system call at its end."""
    handlers = [h for h in logging.getLogger().handlers if isinstance(h, _Handler)]
    for handler in handlers:
        handler.lines = []
    try:
        yield
    finally:
        for handler in handlers:
            handler.end_block()


def _without_bars(stream: TextIO) -> AbstractContextManager[None]:
    """Remove the progress bars of this process from a terminal, and draw them again at the end of the block."""
    tqdm: Any = sys.modules.get("tqdm")
    if tqdm is None:
        return contextlib.nullcontext()
    without: AbstractContextManager[None] = tqdm.tqdm.external_write_mode(file=stream)
    return without


class _Handler(logging.StreamHandler):  # type: ignore[type-arg] # not generic at run time
    """Writes messages at once, or collects them in `lines` while that is a list.

    A critical message is waited for a moment where the stream has a queue: the process may end right after it.
    """

    lines: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write or collect a message; called with the handler's lock."""
        if self.lines is None:
            with _without_bars(self.stream):
                super().emit(record)
            if record.levelno >= logging.CRITICAL:
                drain(_LAST_SECONDS)
            return
        try:
            self.lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - as in `logging`
            self.handleError(record)

    def end_block(self) -> None:
        """Write the collected messages."""
        with self.lock or contextlib.nullcontext():
            lines, self.lines = self.lines, None
            # As in `logging`, a stream that was closed makes no request fail.
            with contextlib.suppress(OSError, ValueError):
                if lines:
                    self.stream.write("\n".join([*lines, ""]))
                    self.flush()


class _Formatter(logging.Formatter):
    """Renders times, once per second.

    Args:
        time_format: of `time.strftime`.
        to_time: converts seconds since the epoch to the fields of that format.
    """

    def __init__(
        self, time_format: str, to_time: Callable[[float | None], time.struct_time]
    ) -> None:
        super().__init__()
        self._time_format = time_format
        self._to_time = to_time
        self._second = -1
        self._shown = ""

    def time_of(self, record: logging.LogRecord) -> str:
        """Return when a record was made, to the second."""
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._shown = time.strftime(self._time_format, self._to_time(second))
        return self._shown


class _TextFormatter(_Formatter):
    """Renders a record as time, level, logger and message."""

    def __init__(self) -> None:
        super().__init__("%H:%M:%S", time.localtime)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, with a traceback below it if there is one."""
        shown = self.time_of(record)
        line = f"{shown} {record.levelname:<7} {record.name:<14} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(_Formatter):
    """Renders a record as one JSON object on one line.

    A message with a method `fields` consists of named values: each becomes a key of its own.
    """

    def __init__(self) -> None:
        super().__init__("%Y-%m-%dT%H:%M:%S", time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, Any] = {
            "time": f"{self.time_of(record)}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record.msg, "fields", None)
        if fields is None:
            entry["message"] = record.getMessage()
        else:
            entry |= fields()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode(entry).decode("utf-8")
