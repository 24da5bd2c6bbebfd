"""The engine of several front ends: each has a line to this process, which owns the engine process.

    front end 1 ─┐                                    every step goes to every front end,
    front end 2 ─┼── hub ── engine process            which takes the tokens of its own requests
    front end 3 ─┘

One place so sees every request, as supervision needs: it knows whether a silent engine owes anything, and what to abort
when a front end dies. A step is passed on as the bytes that came. Knows no HTTP and starts no front end.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from server.engine.link.protocol import AbortRequests, Attached, EngineState, EngineStatus
from server.engine.link.spawn import ENGINE_COMMAND, EngineStartError
from server.engine.link.supervisor import EngineSupervisor

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

    from server.engine.link.protocol import EngineConfig, StepMessage

# Request ids of one line; a line that takes the place of another has ids of its own.
_IDS_PER_LINE = 1 << 40


class _RequestHead(msgspec.Struct, frozen=True, tag="generate"):
    """As much of a `GenerateRequest` as passing it on needs."""

    request_id: int


_LineMessage = _RequestHead | AbortRequests | Attached


@dataclass(eq=False, slots=True)
class Line:
    """The hub's end of the line to one front end.

    Attributes:
        address: what `server.engine.link.remote` connects to.
        first_id: of its requests.
        on_attached: called once the front end reads.
        attached: whether it does.
        request_ids: of the requests that it has in the engine.
    """

    address: str
    first_id: int
    requests: zmq.Socket[bytes]
    steps: zmq.Socket[bytes]
    on_attached: Callable[[], None]
    attached: bool = False
    request_ids: set[int] = field(default_factory=set)


class EngineHub(EngineSupervisor):
    """Owns the engine process and the lines to the front ends.

    Args:
        config: as for `EngineSupervisor`.
        hang_seconds: likewise.
        command: likewise.
        spawned: likewise.

    Attributes:
        directory: holds the lines' sockets; mode 0700, so that nobody else can connect.

    Raises:
        EngineStartError: the operating system refuses the folder.
    """

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 300.0,
        command: Sequence[str] = ENGINE_COMMAND,
        spawned: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__(config, hang_seconds, command, spawned)
        try:
            self.directory = Path(tempfile.mkdtemp(prefix="tessera-"))
        except OSError as error:
            raise EngineStartError(f"no folder for sockets: {error}") from error
        self._lines: list[Line] = []
        self._num_lines = 0
        self._line_decoder = msgspec.msgpack.Decoder(_LineMessage)

    def open_line(self, on_attached: Callable[[], None]) -> Line:
        """Make the line to a front end that is about to be started.

        Args:
            on_attached: called once it reads.
        """
        self._num_lines += 1
        address = f"ipc://{self.directory}/{self._num_lines}"
        requests, steps = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket, name in ((requests, "requests"), (steps, "steps")):
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(f"{address}-{name}")
        line = Line(address, self._num_lines * _IDS_PER_LINE, requests, steps, on_attached)
        self._lines.append(line)
        assert self._loop is not None
        self._loop.add_reader(int(requests.fd), self._read_line, line)
        return line

    def close_line(self, line: Line) -> None:
        """Forget a front end that is gone, and abort what it had asked for."""
        assert self._loop is not None
        self._lines.remove(line)
        self._loop.remove_reader(int(line.requests.fd))
        line.requests.close()
        line.steps.close()
        if line.request_ids:
            self._send(AbortRequests(list(line.request_ids)))

    def kill(self) -> None:
        """End the engine process at once, without an event loop."""
        shutil.rmtree(self.directory, ignore_errors=True)
        super().kill()

    async def stop(self) -> None:
        """End the engine; the front ends are gone, or see their requests end with an error."""
        await super().stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _read_line(self, line: Line) -> None:
        """Take every message that is there: the descriptor speaks up only once for all of them."""
        while line in self._lines:
            try:
                data = line.requests.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._line_decoder.decode(data)
            if isinstance(message, Attached):
                line.attached = True
                self._tell(line, self._status())
                line.on_attached()
            elif isinstance(message, AbortRequests):
                line.request_ids.difference_update(message.request_ids)
                self._send_encoded(data)
            elif self.state is EngineState.READY:
                # Else its front end is about to hear that the engine is gone, and ends it.
                self._send_encoded(data)
                line.request_ids.add(message.request_id)

    def _status(self, lost: str | None = None) -> bytes:
        return self._encoder.encode(
            EngineStatus(
                state=self.state,
                phase=self.phase,
                info=self.info,
                stats=self.stats,
                past=self.past,
                restarts=self.restarts,
                lost=lost,
            )
        )

    def _tell(self, line: Line, data: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # it is gone: `close_line` follows
            line.steps.send(data, zmq.NOBLOCK)

    def _tell_all(self, data: bytes) -> None:
        for line in self._lines:
            if line.attached:
                self._tell(line, data)

    def _has_requests(self) -> bool:
        return any(line.request_ids for line in self._lines)

    def _on_steps(self, steps: list[tuple[bytes, StepMessage]]) -> None:
        for data, _ in steps:
            self._tell_all(data)
        for _, step in steps:
            if any(step.finish_reasons):
                ended = {
                    request_id
                    for request_id, reason in zip(
                        step.request_ids, step.finish_reasons, strict=True
                    )
                    if reason
                }
                for line in self._lines:
                    line.request_ids -= ended

    def _on_change(self) -> None:
        self._tell_all(self._status())

    def _on_loss(self, error: str) -> None:
        for line in self._lines:
            line.request_ids.clear()
        self._tell_all(self._status(error))
