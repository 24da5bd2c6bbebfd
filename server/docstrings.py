"""Reads the descriptions of a record's fields, which help texts and API documents show, from its docstring."""

from __future__ import annotations

import inspect
import re

_ENTRY = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def attribute_texts(record: type) -> dict[str, str]:
    """Return the texts of the section `Attributes` of a class's docstring by name, each on one line."""
    _, _, section = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")
    entries = _ENTRY.findall(section.partition("\n\n")[0])
    return {name: " ".join(text.split()) for name, text in entries}
