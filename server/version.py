"""Which Tessera this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """As installed; "unknown" for a copy of the tree that was never installed."""
    try:
        return importlib.metadata.version("tessera")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
