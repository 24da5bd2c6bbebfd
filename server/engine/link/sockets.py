"""Messages between a parent process and its child, over a pair of connected sockets, and the receive loop.

The sockets come from `server.engine.link.spawn`. A message is its length, 4 bytes, and its bytes.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

log = logging.getLogger("tessera")

# Messages handled in one pass of the event loop, so that a fast sender cannot starve other callbacks.
_MAX_BATCH: Final = 64

# Largest message towards the engine. The largest legal one, a prompt of a million tokens, has 5 MB.
MAX_REQUEST_BYTES: Final = 256 * 2**20

_LENGTH: Final = struct.Struct("<I")
_MOST_BYTES: Final = 2**32 - 1
_READ_BYTES: Final = 1 << 16
_MOST_PARTS: Final = 64  # of one call; systems allow 1024

# The system gives less than is asked for if its own limit is lower.
_BUFFER_BYTES: Final = 1 << 20

_FLAGS: Final = getattr(socket, "MSG_NOSIGNAL", 0)
_NO_MEMORY: Final = (errno.ENOBUFS, errno.ENOMEM)
_PAUSE_SECONDS: Final = 0.0005

# How often the thread that writes looks whether the connection was closed; closing it wakes the thread as well.
_WRITE_SECONDS: Final = 1.0


class Connection:
    """One side of the connection between a parent process and its child.

    Messages are bytes and arrive in order. The queue has no limit, so sending never blocks; the sender must watch that
    the receiver reads, as `server.engine.link.front_end.hub` does. What the system does not take at once is written by
    a thread. Any thread may send; the other methods are for one.

    Args:
        descriptor: of the socket, which this object owns from now on.
        max_bytes: larger messages of the peer are dropped without being held.

    Raises:
        OSError: the descriptor is no socket.
    """

    def __init__(self, descriptor: int, max_bytes: int = _MOST_BYTES) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(False)
        os.set_inheritable(descriptor, False)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._fd = descriptor
        self._max_bytes = max_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_messages: Callable[[list[bytes]], None]

        self._arrived: deque[bytes] = deque()
        self._partial = bytearray()
        self._skipped_bytes = 0  # that are still to come of a message that is too large
        self._at_end = False  # the peer sends no more
        self._scheduled = False

        self._changed = threading.Condition()  # guards what follows
        self._unsent: deque[bytes | memoryview] = deque()  # lengths and messages
        self._writing = False  # by a thread
        self._closed = False

    def send(self, data: bytes) -> None:
        """Queue a message, which is lost if the peer ends before it reads it. Does nothing after `close`.

        Raises:
            ValueError: the message has 4 GiB or more.
        """
        if len(data) > _MOST_BYTES:
            raise ValueError(f"a message of {len(data)} bytes; the limit is {_MOST_BYTES}")
        with self._changed:
            if self._closed:
                return
            self._unsent += (_LENGTH.pack(len(data)), data)
            if self._writing or self._write():
                return
            # If no thread can be started, the next message tries again.
            with contextlib.suppress(RuntimeError):
                threading.Thread(target=self._write_all, name="link-writer", daemon=True).start()
                self._writing = True

    def _write(self) -> bool:
        """Hand to the system what it takes; return whether nothing is left. `_changed` is held."""
        unsent = self._unsent
        try:
            while unsent:
                parts = itertools.islice(unsent, _MOST_PARTS)
                sent = self._socket.sendmsg(parts, (), _FLAGS)
                while unsent and sent >= len(unsent[0]):
                    sent -= len(unsent.popleft())
                if sent:
                    unsent[0] = memoryview(unsent[0])[sent:]
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_MEMORY:
                return False
            unsent.clear()  # the peer has gone
        self._changed.notify_all()
        return True

    def _write_all(self) -> None:
        """Write until nothing is left; runs on a thread of its own."""
        ready = select.poll()
        ready.register(self._fd, select.POLLOUT)
        while True:
            ready.poll(_WRITE_SECONDS * 1000)
            time.sleep(
                _PAUSE_SECONDS
            )  # lets the peer read; and without memory the socket is ready at once
            with self._changed:
                if self._closed or self._write():
                    self._writing = False
                    return

    def flush(self, seconds: float) -> None:
        """Wait until the system has taken all messages, the peer has gone or the time is over.

        Args:
            seconds: `math.inf` waits without a limit.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._unsent or self._closed, None if math.isinf(seconds) else seconds
            )

    def receive(self, *, wait: float) -> Iterator[bytes]:
        """Yield all messages that have arrived, for a process without an event loop.

        Args:
            wait: seconds to wait for a message if none has arrived; `math.inf` waits without a limit.
        """
        if not self._arrived:
            self._read()
        if wait and not self._arrived:
            self._await_data(wait)
        while batch := self._take_batch():
            yield from batch

    def _await_data(self, seconds: float) -> None:
        """Wait until a whole message has arrived or the time is over."""
        until = time.monotonic() + seconds
        ready = select.poll()
        if not self._at_end:
            ready.register(self._fd, select.POLLIN)
        while not self._arrived and (left := until - time.monotonic()) > 0:
            ready.poll(None if math.isinf(left) else left * 1000)
            if not self._read() and self._at_end:
                ready = select.poll()  # waits for the time only; this process is about to end

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

    def drain(self) -> None:
        """Call `on_messages` with all messages that have arrived."""
        while batch := self._take_batch():
            self._on_messages(batch)

    def _receive_batch(self) -> None:
        assert self._loop is not None
        self._scheduled = False
        batch = self._take_batch(reads=1)
        if self._arrived and not self._scheduled:  # no event will come for them
            self._scheduled = True
            self._loop.call_soon(self._receive_batch)
        if self._at_end and not self._closed:
            self._loop.remove_reader(self._fd)
        if batch:
            self._on_messages(batch)

    def _take_batch(self, reads: int = _MAX_BATCH) -> list[bytes]:
        """Return the next messages; reads at most `reads` times from the socket."""
        while len(self._arrived) < _MAX_BATCH and reads and self._read():
            reads -= 1
        return [self._arrived.popleft() for _ in range(min(len(self._arrived), _MAX_BATCH))]

    def _read(self) -> bool:
        """Read once from the socket; return whether there was something."""
        if self._closed or self._at_end:
            return False
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # the peer has ended before it had read everything
            data = b""
        self._at_end = not data
        if data:
            self._split(data)
        return bool(data)

    def _split(self, data: bytes) -> None:
        """Divide what has arrived into messages."""
        received: bytes | bytearray = data
        if self._partial:
            self._partial += data
            received = self._partial
        at, total = 0, len(received)
        while at < total:
            if self._skipped_bytes:
                skipped = min(self._skipped_bytes, total - at)
                self._skipped_bytes -= skipped
                at += skipped
                continue
            if total - at < _LENGTH.size:
                break
            (size,) = _LENGTH.unpack_from(received, at)
            start = at + _LENGTH.size
            if size > self._max_bytes:
                log.error("dropped a message of %d bytes; the limit is %d", size, self._max_bytes)
                self._skipped_bytes, at = size, start
                continue
            if total - start < size:
                break
            at = start + size
            self._arrived.append(bytes(received[start:at]))
        if received is self._partial:
            del self._partial[:at]
        else:
            self._partial += data[at:]

    def close(self) -> None:
        """Close the socket; what was not sent yet is lost. Calling it again does nothing."""
        if self._loop is not None and not self._closed and not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._unsent.clear()
            self._arrived.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that writes
            self._socket.close()
            self._changed.notify_all()
