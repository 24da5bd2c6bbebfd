"""Processes and threads that help with single requests give way to those that serve all of them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Final

_HELPERS: Final = 5
"""A third of the processor time that a process with the usual niceness gets beside it."""


def give_way() -> None:
    """Lower the priority of this process, or on Linux of this thread only if others of the process run."""
    if threading.current_thread() is threading.main_thread():
        os.nice(_HELPERS)
    elif sys.platform == "linux":  # elsewhere threads have no niceness of their own
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + _HELPERS
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
