"""Opens listening sockets: one, or several that share a port."""

from __future__ import annotations

import ipaddress
import socket

from server.engine.core.start_checks import StartupError


def listen(host: str, port: int, count: int = 1) -> list[socket.socket]:
    """Open sockets that listen on an address.

    Args:
        host: address or name.
        port: 0 chooses a free one.
        count: number of sockets. The kernel distributes connections among them by a hash of their addresses.

    Raises:
        StartupError: the address is in use or does not belong to this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        first = _bind(family, address)
        if count == 1:
            return [first]
        if not hasattr(socket, "SO_REUSEPORT"):
            raise StartupError("this system does not let processes share a port")
        # Shared sockets could join those of another service; binding one that is not shared shows that the port is
        # free.
        address = first.getsockname()
        first.close()
        return [_bind(family, address, shared=True) for _ in range(count)]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise StartupError(f"cannot listen on {host}:{port}: {reason}") from error


def local_hosts(host: str, listener: socket.socket) -> tuple[str, ...]:
    """Return the names by which programs of this machine reach the service; none if others can reach it too."""
    if not is_loopback(listener.getsockname()[0]):
        return ()
    bound = f"[{host}]" if ":" in host else host
    return tuple(dict.fromkeys(["localhost", "127.0.0.1", "[::1]", bound.lower()]))


def is_loopback(address: str) -> bool:
    """Whether only programs of this machine reach a numeric address, which may have a zone."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


def _bind(family: int, address: object, *, shared: bool = False) -> socket.socket:
    # With IPPROTO_TCP given, asyncio recognizes TCP and sets TCP_NODELAY: small writes are sent at once.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen()  # claims the port: until one socket listens, others may bind to it
    except OSError:
        listener.close()
        raise
    return listener
