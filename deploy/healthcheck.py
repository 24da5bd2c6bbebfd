"""The container's health check: exits with 0 if the service in it takes requests, else with 1 and the reason.

Runs every few seconds, so it needs nothing but the standard library. Knows none of the service's code: it finds the
address where the service does, in the flags of its command or else in the environment.
"""

from __future__ import annotations

import argparse
import http.client
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Shorter than the health check's limit in the Dockerfile, which would end this without a reason.
_TIMEOUT_SECONDS = 4
_COMMAND = Path("/proc/1/cmdline")
# An address to listen on is not always one to connect to.
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - nothing is bound to it here


def main() -> None:
    """Ask the service and exit with its answer."""
    command = _COMMAND.read_text(errors="replace").split("\0") if _COMMAND.exists() else []
    host, port = address(command, os.environ)
    # Not urllib: it would go by the proxy that the environment names.
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/health")
        reply = connection.getresponse()
        body = reply.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        sys.exit(f"{host} port {port}: {error}")
    print(reply.status, body)
    sys.exit(reply.status != http.client.OK)


def address(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, int]:
    """Host and port at which the service is reached.

    Args:
        command: the words of the container's first process, which is the service or an init that runs it.
        environment: the container's.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default=environment.get("TESSERA_HOST") or "127.0.0.1")
    parser.add_argument("--port", type=int, default=environment.get("TESSERA_PORT") or "8000")
    found, _ = parser.parse_known_args(_flags(command))
    return _REACHED_AT.get(found.host, found.host), found.port


def _flags(command: Sequence[str]) -> list[str]:
    """What follows `tessera serve`."""
    for place in range(1, len(command)):
        if command[place] == "serve" and Path(command[place - 1]).name == "tessera":
            return list(command[place + 1 :])
    return []


if __name__ == "__main__":
    main()
