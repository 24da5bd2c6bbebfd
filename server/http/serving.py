"""Runs the application under uvicorn until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import uvicorn

from server.engine.link.spawn import ending_signals
from server.http.edge.access_log import MAX_DELAY_SECONDS
from server.http.edge.api_keys import ApiKeys
from server.http.edge.fair_start import FairStart
from server.http.transport import protocol_factory

if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Callable, Iterable, Iterator

    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from server.http.config import HTTPConfig
    from server.http.lifecycle import Lifecycle

_POLL_SECONDS: Final = 0.02
_LAST_REQUESTS_SECONDS: Final = 0.1
"""Time for connections that were accepted just before the end: their requests are refused."""
_FLUSH_SECONDS: Final = 1.0
"""Time for the last bytes of responses that were ended."""


def with_middleware(app: ASGIApp, keys: Iterable[str] = ()) -> ASGIApp:
    """Wrap an application in the middleware that the service needs under uvicorn.

    Args:
        app: the application.
        keys: API keys of the service, by which requests take turns; by address without them.
    """
    return FairStart(app, ApiKeys(keys).client_of)


class HTTPServer(uvicorn.Server):
    """uvicorn's server with our protocol, which ends in the stages of `server.http.lifecycle`.

    It listens until the last of them, and does not raise a signal again after it has stopped; that would end the
    process before the engine is shut down in order.

    Args:
        app: the application.
        config: limits of connections.
        signals: the first of them begins the end, and a second one ends the requests in progress. None means those of
            `ending_signals`.
        on_signal: called with each of them.
    """

    def __init__(
        self,
        app: FastAPI,
        config: HTTPConfig,
        signals: Iterable[signal.Signals] | None = None,
        on_signal: Callable[[], object] = lambda: None,
    ) -> None:
        self._state = app.state
        self._lifecycle: Lifecycle = app.state.lifecycle
        self._signals = ending_signals() if signals is None else tuple(signals)
        self._on_signal = on_signal
        super().__init__(
            uvicorn.Config(
                with_middleware(app, config.api_key),
                http=protocol_factory(config),  # type: ignore[arg-type] # uvicorn only calls it
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                ws="none",
                proxy_headers=False,  # anybody can send them; see `client_of_address`
            )
        )

    @property
    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """Factory of this server's event loop: uvloop's if it is installed."""
        return self.config.get_loop_factory()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `run_until_stopped`."""
        yield

    async def run_until_stopped(self, listener: socket.socket) -> None:
        """Serve on a bound socket until a signal or `stop`; return when every request has ended."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._begin_to_end)
        serving = asyncio.ensure_future(self.serve(sockets=[listener]))
        stages = asyncio.ensure_future(self._lifecycle.run())
        try:
            await asyncio.wait({serving, stages}, return_when=asyncio.FIRST_COMPLETED)
            if stages.done():
                await self._end_requests()
            self.should_exit = self.force_exit = True
            await serving
        finally:
            stages.cancel()
        self._state.close()  # wakes threads that wait for other processes
        await asyncio.sleep(2 * MAX_DELAY_SECONDS)  # for the last lines of the access log
        if (tracing := getattr(self._state, "tracing", None)) is not None:
            await asyncio.to_thread(tracing.close)

    def _begin_to_end(self) -> None:
        self._on_signal()
        self._lifecycle.stop()

    def close(self) -> None:
        """End the threads and processes of the application."""
        self._state.close()

    def stop(self) -> None:
        """Make `run_until_stopped` end all requests and return."""
        self._lifecycle.stop()
        self._lifecycle.stop()  # without waiting for the requests in progress

    async def _end_requests(self) -> None:
        """End the requests that are left, close idle connections, and let clients read what was sent."""
        self._lifecycle.cancel_requests()
        for server in self.servers:
            server.close()
        await asyncio.sleep(_LAST_REQUESTS_SECONDS)
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=_FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for _ in range(int(_FLUSH_SECONDS / _POLL_SECONDS)):
            if not self.server_state.connections:
                break
            await asyncio.sleep(_POLL_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
