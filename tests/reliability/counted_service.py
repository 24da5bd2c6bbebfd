"""Runs `tessera serve` with a thread that counts its Python objects, which /proc cannot show.

The thread belongs to the test: the product has no such hook. It answers a datagram on a UNIX socket with the
numbers of asyncio tasks, including those that have ended and are still referenced, and of objects that the garbage
collector tracks.

    python -m tests.reliability.counted_service SOCKET (model | fake) [options of tessera serve]
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading

from server.cli.command_settings import read_settings
from server.cli.serve import serve
from server.engine.link.spawn import ENGINE_COMMAND

FAKE_ENGINE = (sys.executable, "-m", "tests.engine.link.fake_engine", "ok")


def answer(path: str) -> None:
    """Answer datagrams for ever."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        while True:
            _, sender = receiver.recvfrom(16)
            gc.collect()
            objects = gc.get_objects()
            tasks = sum(isinstance(it, asyncio.Task) for it in objects)
            reply = json.dumps({"tasks": tasks, "objects": len(objects)}).encode()
            del objects
            receiver.sendto(reply, sender)


def ask(path: str) -> dict[str, int]:
    """Ask a running service for its counts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.bind("")  # Linux chooses a name, to which the reply is sent
        sender.settimeout(30)
        sender.sendto(b"?", path)
        counts: dict[str, int] = json.loads(sender.recv(1000))
        return counts


def main() -> None:
    """Serve until a signal."""
    path, engine, *options = sys.argv[1:]
    threading.Thread(target=answer, args=(path,), name="object-counter", daemon=True).start()
    serve(read_settings(options), FAKE_ENGINE if engine == "fake" else ENGINE_COMMAND)


if __name__ == "__main__":
    main()
