"""What the service and the process that renders say to each other, and the limits of that process.

A task is a JSON array: `["compile", key, source, marks]`, or `["render", key, variables, now]`, where `now` is a time
of `time.time`, the zone's offset from UTC in seconds, and its name. A reply is a byte of `Kind` and a text.
"""

from __future__ import annotations

import enum
from typing import Final

SECONDS: Final = 1.0
"""Processor time of a rendering, and of a compilation."""
MEMORY_BYTES: Final = 256 << 20
"""Address space of the process, of which the interpreter takes 25 MiB."""
MAX_SOURCE: Final = 1 << 20
"""Characters of a template."""
MAX_TEXT: Final = 8_000_000
"""Characters of a rendered text."""
FUNCTIONS: Final = frozenset(
    ("cycler", "dict", "joiner", "namespace", "raise_exception", "range", "strftime_now")
)
"""The global functions of a template."""
MAX_MESSAGE: Final = 4_000
"""Characters of an error that a template causes; the rest is cut off."""

COMPILE: Final = "compile"
RENDER: Final = "render"


class Kind(enum.IntEnum):
    """What the text of a reply is."""

    TEXT = 0
    """The rendered text, or nothing after a compilation."""
    INVALID = 1
    """Why the template cannot be compiled."""
    REFUSAL = 2
    """What the template said in `raise_exception`."""
    FAILURE = 3
    """The error that it caused."""
    LIMIT = 4
    """The limit that it reached."""
    MEMORY = 5
    """The limit of memory. Earlier tasks may have left less of it."""
