"""Requests /health every 10 ms from a process of its own until its standard input ends, and prints what it measured.

python -m tests.attacks.probe HOST PORT
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

_INTERVAL_SECONDS = 0.01
_TIMEOUT_SECONDS = 10.0


def _status(host: str, port: int) -> int | None:
    """Request /health on a new connection; None if no status came."""
    request = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection((host, port), _TIMEOUT_SECONDS) as connection:
            connection.sendall(request.encode())
            answer = b""
            while b"\r\n" not in answer and (data := connection.recv(4096)):
                answer += data
        return int(answer.split()[1])
    except (OSError, IndexError, ValueError):
        return None


def main() -> None:
    """Measure, and print the milliseconds and the status of each request as JSON."""
    host, port = sys.argv[1], int(sys.argv[2])
    measured: list[tuple[float, int | None]] = []
    due = time.perf_counter()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
        start = time.perf_counter()
        status = _status(host, port)
        measured.append((1000 * (time.perf_counter() - start), status))
        due = max(due + _INTERVAL_SECONDS, time.perf_counter())
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
