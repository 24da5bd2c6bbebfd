"""What the command line must know of a setting beside its name, type, default and description."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Group = Literal["model", "HTTP", "engine", "memory", "process"]
"""Groups of the help text."""


class Form(NamedTuple):
    """What the text of a setting looks like, or each text of a list.

    Attributes:
        pattern: regular expression that matches the whole text.
        refusal: completes a message that begins with a text that it does not match.
    """

    pattern: str
    refusal: str


@dataclass(frozen=True, slots=True)
class Setting:
    """Metadata of a field of a record of settings: `block_size: Annotated[int, Setting(ge=1)] = 16`.

    Attributes:
        group: of the help text; None for that of the record.
        ge, gt, le: limits of a number.
        form: of a text.
        secret: whether messages must not show the value.
        restricts: whether it keeps others out, so that an empty text is an error instead of no text.
    """

    group: Group | None = None
    ge: int | None = None
    gt: int | None = None
    le: int | None = None
    form: Form | None = None
    secret: bool = False
    restricts: bool = False

    @property
    def limits(self) -> dict[str, int]:
        """The limits that are set, by name."""
        limits = {"ge": self.ge, "gt": self.gt, "le": self.le}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def __get_pydantic_core_schema__(
        self, source: object, handler: Callable[[object], dict[str, Any]]
    ) -> dict[str, Any]:
        """Make pydantic check the limits; it calls this for a field with this metadata."""
        schema = handler(source)
        # `int | None` contains the schema of `int`.
        schema.get("schema", schema).update(self.limits)
        return schema
