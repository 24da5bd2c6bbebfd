"""Runs the application under uvicorn until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import uvicorn

from server.http.edge.access_log import MAX_DELAY_SECONDS
from server.http.fair_start import FairStart
from server.http.transport import protocol_factory

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from server.http.config import HTTPConfig

# After a signal, requests in flight may run for this long before they are cancelled.
_SHUTDOWN_SECONDS = 30


def with_middleware(app: ASGIApp) -> ASGIApp:
    """Wrap an application in the middleware that the service needs under uvicorn."""
    return FairStart(app)


class HTTPServer(uvicorn.Server):
    """uvicorn's server with our protocol; it does not raise a signal again after it has stopped.

    That would end the process before the engine is shut down in order.

    Args:
        app: the application.
        config: limits of connections.
    """

    def __init__(self, app: FastAPI, config: HTTPConfig) -> None:
        self._state = app.state
        super().__init__(
            uvicorn.Config(
                with_middleware(app),
                http=protocol_factory(config),  # type: ignore[arg-type] # uvicorn only calls it
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws="none",
                proxy_headers=False,  # the client's address is never used
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            )
        )

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """Factory of this server's event loop: uvloop's if it is installed."""
        return self.config.get_loop_factory()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal; a second SIGINT no longer waits for requests in flight."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def run_until_stopped(self, listener: socket.socket) -> None:
        """Serve on a bound socket; return when every connection is closed."""
        await self.serve(sockets=[listener])
        await asyncio.sleep(2 * MAX_DELAY_SECONDS)  # for the last lines of the access log
        if (tracing := getattr(self._state, "tracing", None)) is not None:
            await asyncio.to_thread(tracing.close)
