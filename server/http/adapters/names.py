"""Names that an adapter may have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
ANY_MODEL: Final = ("tgi", "dummy")
"""What clients of servers with one model send as its name: it means the model, not an adapter."""


def name_problem(name: str, served: Collection[str]) -> str | None:
    """Return why an adapter cannot have a name, the end of a sentence that begins with it; None if it can.

    Args:
        name: of letters, digits and signs, see `NAME`.
        served: names of the model.
    """
    if name in served:
        return "is a name of the model"
    if name in ANY_MODEL:
        return "means the model, whatever its name is, and cannot be that of an adapter"
    return None
