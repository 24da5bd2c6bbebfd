"""The record of which builds of the C library have passed the tests, on which processor and with which sources."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from kernels.cpu import library

RECORD: Final = Path(__file__).with_name("builds.json")
_NATIVE: Final = Path(library.__file__).parent / "native"


def sources_digest() -> str:
    """Return 16 hexadecimal digits of the C sources and the module that chooses and compiles builds of them."""
    digest = hashlib.sha256()
    for path in [*sorted(_NATIVE.iterdir()), Path(library.__file__)]:
        if path.suffix in {".c", ".h", ".py"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read() -> dict[str, dict[str, Any]]:
    """Return the record: for each build the `sources`, the `processor` and the number of tests that `passed`."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(build: str, processor: str, passed: int) -> None:
    """Enter a build that has passed the tests with the present sources."""
    entry = {"sources": sources_digest(), "processor": processor, "passed": passed}
    entries = read() | {build: entry}
    RECORD.write_text(json.dumps(dict(sorted(entries.items())), indent=2) + "\n")
