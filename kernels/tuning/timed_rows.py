"""Tables of what was timed on one GPU, as JSON files: reading them, and what each row must have."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

_FOLDER = Path(__file__).parent


@functools.cache
def timed_rows(name: str, sm: int) -> tuple[dict[str, Any], ...]:
    """Read the rows of `<name>_sm_<compute capability>.json`; none where there is no such table."""
    path = _FOLDER / f"{name}_sm_{sm}.json"
    return tuple(json.loads(path.read_text())["rows"]) if path.exists() else ()


def form_mistakes(row: dict[str, Any], fields: AbstractSet[str]) -> list[str]:
    """List what is wrong with a row whatever it is for: other keys than `fields`, no provenance."""
    if set(row) != fields:
        return [f"has the keys {sorted(row)}; expected {sorted(fields)}"]
    if not str(row["provenance"]).strip():
        return ["provenance must say where the numbers come from"]
    return []
