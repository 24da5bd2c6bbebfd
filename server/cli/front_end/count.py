"""Chooses the number of front ends."""

from __future__ import annotations

import sys
from typing import Final

from model.device.cpus import usable_cpus
from server.cli.nvidia import may_have_gpu

_CORES_EACH: Final = 4
"""Logical processors for each front end: the engine process and the hub need some, and others may use the machine."""
_MOST: Final = 4
"""Front ends of one engine by default. Together they stream 150,000 tokens per second or more; each takes 100 MB."""

_MOST_MORE: Final = 2
"""Further ones for each further engine: they stream what it generates, and each costs the hub 4 us for every step."""


def front_end_count(wanted: int | None, device: str, num_engines: int = 1) -> int:
    """Return how many front ends serve.

    An engine on a CPU generates less than one front end can stream, and needs the processors itself.

    Args:
        wanted: as the setting `frontends`; None chooses by the processors that this process may use.
        device: as the setting.
        num_engines: engine processes of the service.
    """
    if wanted is not None:
        return wanted
    if device == "cpu" or sys.platform != "linux" or not may_have_gpu():
        return 1
    most = _MOST + _MOST_MORE * (num_engines - 1)
    return max(1, min(most, usable_cpus().logical // _CORES_EACH))
