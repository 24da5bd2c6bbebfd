"""Starts one engine process and owns its sockets; what it says is `server.engine.client`'s business."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.protocol import EngineConfig

ENGINE_COMMAND = (sys.executable, "-m", "server.engine.process")
"""Starts an engine process; the socket folder is appended."""


class EngineStartError(Exception):
    """The engine could not start; the text says why."""


class EngineProcess:
    """A running engine process, its two sockets and their folder; they end together.

    Attributes:
        directory: holds the sockets; mode 0700, so that nobody else can connect.
        requests: to the engine.
        steps: from the engine.
        steps_fd: speaks up when `steps` has something.

    Args:
        command: starts an engine process; takes the socket folder as its last argument.
        config: handed to it.
        context: makes the sockets.

    Raises:
        EngineStartError: the operating system refuses the folder, a socket or the process.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: EngineConfig,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        with contextlib.ExitStack() as undo:
            try:
                self.directory = Path(tempfile.mkdtemp(prefix="tessera-"))
                undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
                self.requests = self._bind(context.socket(zmq.PUSH), "requests", undo)
                self.steps = self._bind(context.socket(zmq.PULL), "steps", undo)
                self.steps_fd = int(self.steps.fd)
                # Standard input carries the configuration, then stays open: its end tells the
                # engine that we are gone.
                self.process = subprocess.Popen(  # noqa: S603 - our own command
                    [*command, str(self.directory)], stdin=subprocess.PIPE
                )
            except (OSError, zmq.ZMQError) as error:
                raise EngineStartError(f"the engine process cannot be started: {error}") from error
            self._undo = undo.pop_all()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(config) + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the process, at once if it still runs, and remove what belongs to it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._undo.close()

    def _bind(
        self, socket: zmq.Socket[bytes], name: str, undo: contextlib.ExitStack
    ) -> zmq.Socket[bytes]:
        undo.callback(socket.close)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(f"ipc://{self.directory}/{name}")
        return socket
