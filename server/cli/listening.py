"""Sockets to accept connections from: one, or several that share a port. Knows nothing of who accepts."""

from __future__ import annotations

import socket


class ListenError(Exception):
    """The address cannot be listened on; the text says why."""


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Bind before anything slow starts, so that a port in use is known at once.

    Args:
        host: address or name.
        port: 0 takes a free one.
        count: of sockets. The kernel shares the connections among them, by their addresses.

    Raises:
        ListenError: the address is in use, or not one of ours.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        first = _bind(family, address)
        if count == 1:
            return [first]
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ListenError("this system lets no two processes share a port")
        # Sockets that share would share with those of another service too: that the port is free is known from
        # one that does not.
        address = first.getsockname()
        first.close()
        return [_bind(family, address, shared=True) for _ in range(count)]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ListenError(f"cannot listen on {host}:{port}: {reason}") from error


def _bind(family: int, address: object, *, shared: bool = False) -> socket.socket:
    # Named, or asyncio takes it for no TCP and lets small writes wait for the acknowledgement of those before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen()  # two sockets may be bound to one port until one of them listens
    except OSError:
        listener.close()
        raise
    return listener
