"""What makes a field of a configuration record a setting of the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Group = Literal["model", "HTTP", "engine", "memory", "process"]
"""Groups of the help text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the text of a setting looks like, or each text of a list.

    Attributes:
        pattern: regular expression that matches the whole text.
        refusal: completes a message that begins with a text that it does not match.
    """

    pattern: str
    refusal: str


@dataclass(frozen=True, slots=True)
class Setting:
    """The metadata of a field that operators set: `Annotated[int, Setting("tokens in a block", ge=1)] = 16`.

    The field's name, type and default are those of the setting. `server.cli.settings` collects the fields; their flags,
    environment variables, checks, help text and documents follow from them.

    Attributes:
        meaning: for the help text and the documents.
        group: of the help text; None for that of the record.
        ge, gt, le: limits of a number, which must be finite.
        form: of a text.
        secret: whether messages must not show the value.
    """

    meaning: str
    group: Group | None = None
    ge: int | None = None
    gt: int | None = None
    le: int | None = None
    form: Form | None = None
    secret: bool = False

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
        number = schema.get("schema", schema)  # `int | None` contains the schema of `int`
        number.update(self.limits)
        if number["type"] == "float":
            number["allow_inf_nan"] = False
        return schema
