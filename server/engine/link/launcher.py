"""Tells one engine process what it is to be and owns its sockets; what it says is the supervisor's business."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from server.engine.link.protocol import EngineLaunch
from server.engine.link.spawn import EngineStartError, end

if TYPE_CHECKING:
    import subprocess

    from server.engine.link.protocol import EngineConfig


class EngineProcess:
    """A running engine process, its two sockets and their folder; they end together.

    Attributes:
        directory: holds the sockets; mode 0700, so that nobody else can connect.
        requests: to the engine.
        steps: from the engine.
        steps_fd: speaks up when `steps` has something.

    Args:
        process: from `server.engine.link.spawn`, not told anything yet. Ended where this raises.
        config: handed to it.
        context: makes the sockets.

    Raises:
        EngineStartError: the operating system refuses the folder or a socket.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        config: EngineConfig,
        context: zmq.Context[zmq.Socket[bytes]],
    ) -> None:
        self.process = process
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            try:
                self.directory = Path(tempfile.mkdtemp(prefix="tessera-"))
                undo.callback(shutil.rmtree, self.directory, ignore_errors=True)
                self.requests = self._bind(context.socket(zmq.PUSH), "requests", undo)
                self.steps = self._bind(context.socket(zmq.PULL), "steps", undo)
                self.steps_fd = int(self.steps.fd)
            except (OSError, zmq.ZMQError) as error:
                raise EngineStartError(f"the engine process cannot be started: {error}") from error
            self._undo = undo.pop_all()
        assert self.process.stdin is not None
        # It stays open: its end tells the engine that we are gone.
        with contextlib.suppress(BrokenPipeError):
            launch = EngineLaunch(directory=str(self.directory), config=config)
            self.process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the process, at once if it still runs, and remove what belongs to it."""
        self._end()
        self._undo.close()

    def _end(self) -> None:
        end(self.process)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def _bind(
        self, socket: zmq.Socket[bytes], name: str, undo: contextlib.ExitStack
    ) -> zmq.Socket[bytes]:
        undo.callback(socket.close)
        socket.set_hwm(0)
        socket.linger = 0
        socket.bind(f"ipc://{self.directory}/{name}")
        return socket
