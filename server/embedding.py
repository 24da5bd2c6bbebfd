"""Runs Tessera inside another program: its engine as a child process, its HTTP interface as an ASGI application.

    async with embedded_service(Settings(model="Qwen/Qwen3-0.6B")) as service:
        await service.wait_until_ready()
        app.mount("/llm", service.app)

Any ASGI server can run the application, under any path.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model.hub.resolve import is_bundled
from model.text.bounded.processes import try_folder
from model.text.tokenizer import Tokenizer
from server.cli.command_settings import engine_config, find_model
from server.cli.model_name import with_model_name
from server.cli.service_parts import (
    api_keys,
    check_tracing,
    engine_environments,
    http_config,
    tokenizer_path,
)
from server.cli.settings import Settings
from server.engine.link.front_end.client import EngineClient
from server.engine.link.spawn import ENGINE_COMMAND
from server.http.app import create_app
from server.http.text.chat import load_chat_template, with_end_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from fastapi import FastAPI

    from model.text.chat_template import ChatTemplate
    from server.engine.core.messages import EngineConfig
    from server.http.config import HTTPConfig

__all__ = ["EmbeddedService", "Settings", "embedded_service"]


@dataclass(frozen=True, slots=True)
class EmbeddedService:
    """A service in this process.

    Attributes:
        app: answers HTTP requests as `tessera serve` does; 503 until the engine is ready.
        engine: submits requests to the engine, and has its state and statistics.

    Example:
        >>> async def main() -> None:
        ...     async with embedded_service(Settings(device="cpu")) as service:
        ...         await service.wait_until_ready()
        ...         application = FastAPI()
        ...         application.mount("/llm", service.app)
        ...         print(service.engine.state.value)
        ...         await service.drain()
        >>> asyncio.run(main())
        ready
    """

    app: FastAPI
    engine: EngineClient

    async def wait_until_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ChildStartError: the engine cannot start; the text says why.
        """
        await self.engine.wait_until_ready()

    async def drain(self) -> None:
        """Refuse new requests after `drain_delay`, and return when those in progress have ended.

        Those that still run after `drain_timeout` get an error.
        """
        lifecycle = self.app.state.lifecycle
        lifecycle.stop()
        await lifecycle.run()
        lifecycle.cancel_requests()


@contextlib.asynccontextmanager
async def embedded_service(
    settings: Settings, engine_command: Sequence[str] = ENGINE_COMMAND
) -> AsyncIterator[EmbeddedService]:
    """Start the engine processes and an application that uses them, on the running event loop.

    On leaving, the engine processes end; requests that are still running get an error. If
    this process is killed, the engine ends too. Signals, logging and the event loop stay the caller's.

    Args:
        settings: of the service. Those of sockets and processes have no effect: host, port, front ends, limits of
            connections and headers. Those of draining are for `EmbeddedService.drain`. `allowed_hosts` is any host
            unless it is set.
        engine_command: starts an engine process.

    Raises:
        ModelError: the model is not found or not supported.
        StartupError: an engine with these settings cannot start on this machine, the file of API keys is not valid, or
            spans cannot be exported.
        ChildStartError: the engine process cannot be started.

    Example:
        >>> async def main() -> None:
        ...     async with embedded_service(Settings(device="cpu")) as service:
        ...         await service.wait_until_ready()
        ...         print(service.engine.info.model_id)
        >>> asyncio.run(main())
        bundled
    """
    config, limits, tokenizer, chat_template = await asyncio.to_thread(_prepare, settings)
    environments = await asyncio.to_thread(engine_environments, settings)
    engine = EngineClient(
        config, settings.engine_hang_seconds, engine_command, environments=environments
    )
    try:
        engine.launch()
        app = create_app(engine, tokenizer, limits, chat_template=chat_template)
        await engine.start()
        try:
            yield EmbeddedService(app, engine)
        finally:
            app.state.lifecycle.end()
            await engine.stop()
            app.state.close()
    finally:
        engine.kill()


def _prepare(settings: Settings) -> tuple[EngineConfig, HTTPConfig, Tokenizer, ChatTemplate | None]:
    """Read the files of the model, which may be downloaded first."""
    check_tracing(settings)
    settings = with_model_name(settings)
    model_path, model = find_model(settings)
    hosts = () if "*" in settings.allowed_hosts else settings.allowed_hosts
    limits = http_config(settings, model_path, model, api_keys(settings), hosts)
    folder = tokenizer_path(settings, model_path)
    if not is_bundled(folder):
        try_folder(folder)
    tokenizer = Tokenizer.from_folder(folder)
    chat_template = load_chat_template(folder, tokenizer, limits)
    limits = with_end_tokens(limits, tokenizer, chat_template)
    return engine_config(settings, model_path), limits, tokenizer, chat_template
