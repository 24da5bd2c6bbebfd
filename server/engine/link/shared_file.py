"""Memory that processes share by an inherited descriptor."""

from __future__ import annotations

import os
import tempfile


def shared_file(num_bytes: int = 0) -> int:
    """Return the descriptor of a new file of zeros that has no name, so that nothing can remove or open it.

    On Linux it is memory, which neither /tmp nor /dev/shm has to have room for.

    Raises:
        OSError: the operating system refuses.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("tessera")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor
