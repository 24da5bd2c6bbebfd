"""The container's health check: exits with 0 if the service accepts requests, else with 1 and the reason.

It runs every few seconds, so it imports only the standard library and none of the service's code. Like the service, it
reads the address from the flags of the service's command, or else from the environment.
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

# Shorter than the health check's limit in the Dockerfile, which would kill this script before it prints a reason.
_TIMEOUT_SECONDS = 4
_COMMAND = Path("/proc/1/cmdline")
# Addresses that a server can listen on but a client should not connect to, and what to connect to instead.
_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # nosec B104 # noqa: S104 - nothing is bound here


def main() -> None:
    """Query the service and exit with the matching status."""
    command = _COMMAND.read_text(errors="replace").split("\0") if _COMMAND.exists() else []
    host, port = address(command, os.environ)
    # Not urllib, which would use the proxy that the environment sets.
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
    """Return host and port of the service.

    Args:
        command: command line of the container's first process, which is the service or an init that runs it.
        environment: environment variables of the container.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--host", default=environment.get("TESSERA_HOST") or "127.0.0.1")
    parser.add_argument("--port", type=int, default=environment.get("TESSERA_PORT") or "8000")
    found, _ = parser.parse_known_args(_flags(command))
    return _REACHED_AT.get(found.host, found.host), found.port


def _flags(command: Sequence[str]) -> list[str]:
    """Return the arguments after `tessera serve`."""
    for place in range(1, len(command)):
        if command[place] == "serve" and Path(command[place - 1]).name == "tessera":
            return list(command[place + 1 :])
    return []


if __name__ == "__main__":
    main()
