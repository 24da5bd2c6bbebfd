"""Paths that monitoring requests every few seconds."""

from __future__ import annotations

HEALTH_PATHS = frozenset(
    {"/health", "/health/live", "/health/ready", "/healthz", "/livez", "/ping", "/readyz"}
)
"""Health checks. They need neither an API key nor an allowed Host: they report the engine's state only."""

PROBES = HEALTH_PATHS | {"/metrics"}
"""They are answered until the service has ended, and logged at level debug unless their API key was refused."""
