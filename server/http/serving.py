"""Runs the app on a socket until a signal says stop. Knows no routes and no engine."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import uvicorn

from server.http.fair_start import InTurn
from server.http.transport import WithWires

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from fastapi import FastAPI
    from starlette.types import ASGIApp

# Requests in flight may take so long to end after a signal; the rest is cut off.
_SHUTDOWN_SECONDS = 30


def wrap(app: ASGIApp) -> ASGIApp:
    """Put around an application what is the service's and not a route's."""
    return WithWires(InTurn(app))


class HTTPServer(uvicorn.Server):
    """uvicorn's server, except that signals only ask it to stop.

    uvicorn raises a signal again once it has stopped, which ends the process before the engine is
    shut down in order.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                wrap(app),
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody asks where a client is
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """Makes the event loop that suits this server: uvloop's where it is installed."""
        return self.config.get_loop_factory()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal; a second interrupt no longer waits for requests in flight."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def run_until_stopped(self, listener: socket.socket) -> None:
        """Serve on a bound socket; returns once every connection is closed."""
        await self.serve(sockets=[listener])
