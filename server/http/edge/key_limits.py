"""What the operator allows the requests of an API key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of the requests of a key, or of all requests of a service without keys.

    Attributes:
        lowest_priority: the lowest `priority` with which its requests come before those of other clients; lower ones
            only order its own requests.
        manages_adapters: 1 if its requests may load and unload adapters.
        longest_timeout_ms: milliseconds from a request's arrival after which it ends; None for no limit.
    """

    lowest_priority: int = 0
    longest_timeout_ms: int | None = None
    manages_adapters: int = 0


NO_LIMITS: Final = KeyLimits()
