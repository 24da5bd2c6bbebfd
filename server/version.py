"""The installed version of Tessera."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Return the installed version, or "unknown" if the package is not installed."""
    try:
        return importlib.metadata.version("tessera")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
