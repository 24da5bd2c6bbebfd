"""ZeroMQ sockets between a parent process and its child, and the receive loop. No other module imports zmq."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

# How often a sender tries to connect before its receiver exists. ZeroMQ's default, 100 ms, would delay a first message.
_RECONNECT_MS = 10

# Messages handled in one pass of the event loop, so that a fast sender cannot starve other callbacks.
_MAX_BATCH = 64

# Largest message towards the engine. The largest legal one, a prompt of a million tokens, has 5 MB.
MAX_REQUEST_BYTES = 256 * 2**20

_SENDER_MESSAGES = 16
_SENDER_LINGER_MS = 500


class Sender:
    """Sends messages to the parent from another thread than the one that owns the child's `Connection`.

    Messages that cannot be sent soon are dropped. Used by one thread.
    """

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set_hwm(_SENDER_MESSAGES)
        self._socket.reconnect_ivl = _RECONNECT_MS
        self._socket.connect(f"ipc://{address}-to-parent")

    def send(self, data: bytes) -> None:
        """Queue a message, or drop it if too many wait. Does nothing after `close`."""
        with contextlib.suppress(zmq.Again):
            if not self._socket.closed:
                self._socket.send(data, zmq.NOBLOCK)

    def close(self) -> None:
        """Wait a moment until the queued messages are sent, then close the socket. Calling it again does nothing."""
        self._socket.close(_SENDER_LINGER_MS)
        self._context.term()


class Connection:
    """A pair of one-way sockets between a parent process and its child.

    Messages are bytes and arrive in order. The queues have no limit, so sending never blocks; the sender must watch
    that the receiver reads, as `server.engine.link.front_end.hub` does. Each side binds the socket that receives and
    connects the one that sends: a connecting socket queues messages from the beginning, while a bound one would drop
    those sent before its peer has connected. Not thread-safe.

    Args:
        address: common prefix of the sockets' paths; equal in both processes.
        parent: whether this is the parent's side.
        max_bytes: larger messages of the peer are dropped, and its connection closed and opened again; -1 for no limit.

    Raises:
        OSError: a socket cannot be created or bound.
    """

    def __init__(self, address: str, *, parent: bool, max_bytes: int = -1) -> None:
        self.address = address
        # A child has a single connection and a context of its own, so that `close` can wait until messages are sent.
        self._context: zmq.Context[zmq.Socket[bytes]]
        self._context = zmq.Context.instance() if parent else zmq.Context()
        self._owns_context = not parent
        self._sockets: list[zmq.Socket[bytes]] = []
        self._closed = False  # pyzmq's `closed` asks the library each time
        self._loop: asyncio.AbstractEventLoop | None = None
        sends, receives = ("to-child", "to-parent") if parent else ("to-parent", "to-child")
        try:
            self._receiver = self._open(zmq.PULL)
            self._receiver.maxmsgsize = max_bytes
            self._receiver.bind(f"ipc://{address}-{receives}")
            self._sender = self._open(zmq.PUSH)
            self._sender.connect(f"ipc://{address}-{sends}")
            self._fd = int(self._receiver.fd)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(str(error)) from error

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(0)
        socket.reconnect_ivl = _RECONNECT_MS
        return socket

    def send(self, data: bytes) -> None:
        """Queue a message, which is lost if the peer ends before it reads it. Does nothing after `close`."""
        if not self._closed:
            self._sender.send(data, zmq.NOBLOCK)

    def receive(self, *, wait: float) -> Iterator[bytes]:
        """Yield all messages that have arrived, for a process without an event loop.

        Args:
            wait: seconds to wait for a message if none has arrived; `math.inf` waits without a limit.
        """
        if wait and not self._receiver.poll(None if math.isinf(wait) else int(wait * 1000)):
            return
        while True:
            try:
                data = self._receiver.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield data

    def attach(
        self, loop: asyncio.AbstractEventLoop, on_messages: Callable[[list[bytes]], None]
    ) -> None:
        """Receive messages on an event loop until `close`.

        Args:
            loop: of the calling thread.
            on_messages: called with one or more messages at a time, oldest first.
        """
        self._loop = loop
        self._on_messages = on_messages
        loop.add_reader(self._fd, self._receive_batch)
        # ZeroMQ's descriptor is edge-triggered: there is no event for messages that arrived before `add_reader`.
        loop.call_soon(self._receive_batch)

    def drain(self) -> None:
        """Call `on_messages` with all messages that have arrived."""
        while batch := self._take_batch():
            self._on_messages(batch)

    def _receive_batch(self) -> None:
        assert self._loop is not None
        batch = self._take_batch()
        if len(batch) == _MAX_BATCH:  # there may be more, without another event
            self._loop.call_soon(self._receive_batch)
        if batch:
            self._on_messages(batch)

    def _take_batch(self) -> list[bytes]:
        batch: list[bytes] = []
        if not self._closed:
            with contextlib.suppress(zmq.Again):
                while len(batch) < _MAX_BATCH:
                    batch.append(self._receiver.recv(zmq.NOBLOCK))
        return batch

    def close(self, linger_ms: int = 0) -> None:
        """Close both sockets. Calling it again does nothing.

        Args:
            linger_ms: in a child, how long to wait until queued messages are sent; -1 waits without a limit.
        """
        if self._loop is not None and not self._closed and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._closed = True
        for socket in self._sockets:
            socket.close(linger_ms)
        if self._owns_context:
            self._context.term()
