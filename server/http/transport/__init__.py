"""HTTP/1.1 on a connection, between the event loop and ASGI: limits, timeouts, pipelining and fast writes.

uvicorn opens the sockets and stops the server; the protocol is ours (docs/decisions/0027-http-server.md).
"""

from server.http.transport.connection import HTTP11Protocol, protocol_factory
from server.http.transport.connections import Connections
from server.http.transport.cycle import DirectWriter, direct_writer

__all__ = ["Connections", "DirectWriter", "HTTP11Protocol", "direct_writer", "protocol_factory"]
