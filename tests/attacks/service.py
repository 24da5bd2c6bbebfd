"""Starts the service that is attacked."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.attacks.record import Target
from tests.reliability.managed_service import ManagedService

if TYPE_CHECKING:
    from collections.abc import Iterator

API_KEY = "key-of-the-attacked-service"
MAX_DESCRIPTORS = 1024
"""Limit of descriptors of each of its processes, which many systems have as their default."""
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@contextlib.contextmanager
def attacked_service() -> Iterator[Target]:
    """Serve the bundled model on the CPU, with an API key and few descriptors, and stop the service at the end.

    Raises:
        SystemExit: it did not start.
    """
    options = [f"--api-key={API_KEY}", "--device=cpu", f"--chat-template={_TEMPLATE}"]
    options.append("--log-level=warning")
    service = ManagedService(options, max_descriptors=MAX_DESCRIPTORS)
    try:
        service.start()
        service.wait_until_ready()
        yield Target(host="127.0.0.1", port=service.port, api_key=API_KEY, pid=service.process.pid)
        service.stop()
    finally:
        service.close()
