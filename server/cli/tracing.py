"""Checks before the start that traces can be exported."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.cli.settings import Settings

_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


class TracingError(Exception):
    """Packages that traces need are not installed."""


def check_tracing(settings: Settings) -> None:
    """Check that the packages for `--otlp-endpoint` are installed, if it is given.

    Raises:
        TracingError: they are not.
    """
    if settings.otlp_endpoint is not None and not all(map(_is_installed, _PACKAGES)):
        raise TracingError(
            "--otlp-endpoint needs the packages of the extra `otel`: pip install 'tessera[otel]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False
