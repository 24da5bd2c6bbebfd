"""Log format of all processes of the service: lines for people, or a JSON object per line."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from typing import Any, Literal, TypeAlias

import msgspec

LogFormat: TypeAlias = Literal["text", "json"]

_encode = msgspec.json.Encoder(enc_hook=str).encode
_is_plain = re.compile(r"[A-Za-z0-9._:/@+,;~%{}*-]+").fullmatch


class Fields(dict[str, Any]):
    """A log message that consists of named values. In JSON each is a key of its own, in text it is `name=value`.

    In text, values with anything but plain characters are quoted as in JSON, with only ASCII, so that a value can
    contain neither a line break nor another field.
    """

    def __str__(self) -> str:
        """Return the text."""
        return " ".join([f"{name}={_text(value)}" for name, value in self.items()])


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Write the log messages of this process to standard error.

    Args:
        level: name of a logging level.
        log_format: of each line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter()
        if log_format == "json"
        else logging.Formatter(
            "%(asctime)s %(levelname)-7s %(name)-14s %(message)s", datefmt="%H:%M:%S"
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "huggingface_hub", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class _JsonFormatter(logging.Formatter):
    """Renders a record as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, Fields):
            entry |= record.msg
        else:
            entry["message"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode(entry).decode("utf-8")


def _text(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, str):
        return str(value)
    return value if _is_plain(value) else json.dumps(value)
