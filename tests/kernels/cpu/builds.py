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
    """Return the record, for each build the arguments of `write` and the `sources`."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(build: str, processor: str, passed: int, encoding: str | None = None) -> None:
    """Enter a build that has passed the tests with the present sources.

    Args:
        build: its name.
        processor: that ran it.
        passed: number of tests.
        encoding: of its instructions, if it is another than that of the installed file; see `tests.kernels.cpu.evex`.
    """
    entry = {"sources": sources_digest(), "processor": processor, "passed": passed}
    if encoding is not None:
        entry["encoding"] = encoding
    entries = read() | {build: entry}
    RECORD.write_text(json.dumps(dict(sorted(entries.items())), indent=2) + "\n")
