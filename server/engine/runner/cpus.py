"""The processors that this process may use."""

from __future__ import annotations

import os


def num_usable_cpus() -> int:
    """Return the number of logical processors that the operating system lets this process use, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
