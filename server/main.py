"""The command line, and the wiring of the service. Knows nothing of what happens inside a request."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError

from model.config import ModelConfig
from model.errors import ModelError
from model.hub import BUNDLED, resolve
from server.engine.client import ENGINE_COMMAND, EngineClient, EngineStartError
from server.engine.hub import EngineHub
from server.engine.protocol import EngineConfig
from server.engine.quiet import keep_what_is_there, quiet_idle_threads
from server.http.config import HTTPConfig
from server.listening import ListenError, listen
from server.log import configure_logging
from server.settings import Settings, environment_variable, flag
from server.version import version

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from pathlib import Path

    from server.http.serving import HTTPServer

log = logging.getLogger("tessera")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `tessera` command.

    Args:
        arguments: without the program's name; None takes the command line's.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="tessera", description="Serve text from decoder models.")
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("serve", help="serve a model over HTTP", add_help=False)
    commands.add_parser(
        "plan", help="show which attention kernels a GPU would run, and why", add_help=False
    )
    commands.add_parser(
        "warmup", help="fill the cache of compiled kernels for `serve`", add_help=False
    )
    commands.add_parser("bench", help="measure a server, or the engine", add_help=False)
    command, rest = parser.parse_known_args(arguments)
    if command.command == "serve":
        serve(_read_settings(rest))
    elif command.command == "bench":
        bench(rest)
    elif command.command == "warmup":
        _warm_up(rest)
    else:
        # Imported here: it imports PyTorch, which `serve` leaves to the engine process.
        from server import plan_command  # noqa: PLC0415

        options, rest = plan_command.read_options(rest)
        plan_command.plan(options, _read_settings(rest, "plan"))


def _warm_up(arguments: list[str]) -> None:
    began = time.perf_counter()
    settings = _read_settings(arguments, "warmup")
    configure_logging(settings.log_level)
    quiet_idle_threads()
    from server import warmup_command  # noqa: PLC0415 - PyTorch

    try:
        config = _engine_config(settings, resolve(settings.model, settings.revision))
    except ModelError as error:
        _fail(str(error), "warmup")
    warmup_command.warm_up(config, began)


def bench(arguments: list[str]) -> None:
    """Run one of the benchmarks.

    Args:
        arguments: after `tessera bench`.
    """
    parser = argparse.ArgumentParser(prog="tessera bench", description="Measure how fast it is.")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="kind")
    kinds.add_parser("serve", help="any server, over HTTP, as a client", add_help=False)
    kinds.add_parser("engine", help="the engine here, without HTTP", add_help=False)
    kind, rest = parser.parse_known_args(arguments)
    if kind.kind == "serve":
        # Imported here, as each needs what the other commands do not.
        from server.bench import serve_command  # noqa: PLC0415

        serve_command.main(rest)
    else:
        _bench_engine(rest)


def _bench_engine(arguments: list[str]) -> None:
    began = time.perf_counter()
    # Read before PyTorch is imported, which takes seconds.
    from server.bench.engine_options import SHAPES, read_options, shapes  # noqa: PLC0415

    options, rest = read_options(arguments)
    settings = _read_settings(rest, "bench engine")
    if settings.model in shapes():
        changes = {"model": str(SHAPES / settings.model), "load_format": "dummy"}
        settings = settings.model_copy(update=changes)
    configure_logging(settings.log_level)
    quiet_idle_threads()
    from server.bench import engine_command  # noqa: PLC0415 - PyTorch

    try:
        config = _engine_config(settings, resolve(settings.model, settings.revision))
        engine_command.main(arguments, options, config, settings.model_fields_set, began)
    except ModelError as error:
        _fail(str(error), "bench engine")


def serve(settings: Settings, engine_command: Sequence[str] = ENGINE_COMMAND) -> None:
    """Serve until a signal ends the process; exits with status 1 where the service cannot start.

    Args:
        settings: of the service.
        engine_command: starts an engine process; takes the socket folder as its last argument.
    """
    started = time.perf_counter()
    configure_logging(settings.log_level)
    try:
        model_path = resolve(settings.model, settings.revision)
        # An unsupported model is refused here, before anything is started.
        model_config = ModelConfig.from_folder(model_path)
        listeners = listen(settings.host, settings.port, settings.frontends)
        tokenizer_path = _tokenizer_path(settings, model_path)
    except (ModelError, ListenError) as error:
        _fail(str(error))
    # Until the event loop takes the signal over: leave by way of `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    limits, config = _http_config(settings, model_config), _engine_config(settings, model_path)
    if settings.frontends > 1:
        hub = EngineHub(config, settings.engine_hang_seconds, engine_command)
        _serve_fleet(hub, listeners, tokenizer_path, limits, started)
    else:
        client = EngineClient(config, settings.engine_hang_seconds, engine_command)
        _serve_alone(client, listeners[0], tokenizer_path, limits, started)


def _serve_alone(
    client: EngineClient,
    listener: socket.socket,
    tokenizer_path: Path,
    limits: HTTPConfig,
    started: float,
) -> None:
    """Be the front end and own the engine process."""
    try:
        client.launch()  # the engine process imports PyTorch while this one imports HTTP libraries
        server = _create_server(client, tokenizer_path, limits)
        keep_what_is_there()
        with asyncio.Runner(loop_factory=server.loop_factory) as runner:
            runner.run(_serve(server, client, listener, started))
    except (ModelError, EngineStartError) as error:
        _fail(str(error))
    finally:
        client.kill()


def _serve_fleet(
    hub: EngineHub,
    listeners: list[socket.socket],
    tokenizer_path: Path,
    limits: HTTPConfig,
    started: float,
) -> None:
    """Own the engine process and the front-end processes."""
    from server.fleet import FrontEndStartError, run_fleet  # noqa: PLC0415 - the metrics' library

    try:
        hub.launch()
        keep_what_is_there()
        asyncio.run(run_fleet(hub, listeners, tokenizer_path, limits, started))
    except (EngineStartError, FrontEndStartError) as error:
        _fail(str(error))
    finally:
        hub.kill()


def _tokenizer_path(settings: Settings, model_path: Path) -> Path:
    """The model's folder; random weights can do with any tokenizer, and a shape alone has none."""
    if settings.load_format == "dummy" and not (model_path / "tokenizer.json").exists():
        log.warning("%s has no tokenizer.json; taking the bundled model's", model_path)
        return resolve(BUNDLED)
    return model_path


def _create_server(client: EngineClient, tokenizer_path: Path, limits: HTTPConfig) -> HTTPServer:
    # Imported here so that the engine process is already on its way.
    from model.tokenizer import Tokenizer  # noqa: PLC0415
    from server.http.app import create_app  # noqa: PLC0415
    from server.http.serving import HTTPServer  # noqa: PLC0415

    return HTTPServer(create_app(client, Tokenizer.from_folder(tokenizer_path), limits))


async def _serve(
    server: HTTPServer, client: EngineClient, listener: socket.socket, started: float
) -> None:
    """Serve until a signal comes or the engine turns out unable to start."""
    await client.start()
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d (answers 503 until the model is loaded)", host, port)
    serving = asyncio.ensure_future(server.run_until_stopped(listener))
    ready = asyncio.ensure_future(client.wait_until_ready())
    try:
        done, _ = await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if ready in done:
            ready.result()  # raises where the engine cannot start
            seconds = time.perf_counter() - started
            log.info("ready after %.1f s: POST http://%s:%d/generate", seconds, host, port)
        await serving
    finally:
        server.should_exit = True
        ready.cancel()
        await asyncio.gather(serving, ready, return_exceptions=True)
        await client.stop()


def _http_config(settings: Settings, model_config: ModelConfig) -> HTTPConfig:
    return HTTPConfig(
        model_id=settings.model,
        eos_token_ids=model_config.eos_token_ids,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_body_bytes=settings.max_body_bytes,
    )


def _engine_config(settings: Settings, model_path: Path) -> EngineConfig:
    return EngineConfig(
        model_path=str(model_path),
        model_id=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        quantization=settings.quantization,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        kv_cache_dtype=settings.kv_cache_dtype,
        kv_cache_tokens=settings.kv_cache_tokens,
        kv_cache_gib=settings.kv_cache_gib,
        cuda_graphs=settings.cuda_graphs,
        overlap=settings.overlap,
        enable_prefix_caching=settings.enable_prefix_caching,
        cpu_threads=settings.cpu_threads,
        log_level=settings.log_level,
    )


def _read_settings(arguments: list[str], command: str = "serve") -> Settings:
    """Flags over environment over defaults; exits with status 2 and the limit where a value is wrong."""
    try:
        return Settings(_cli_parse_args=arguments, _cli_prog_name=f"tessera {command}")
    except ValidationError as error:
        for problem in error.errors():
            message = problem["msg"]
            if problem["loc"]:
                field = str(problem["loc"][0])
                names = f"{flag(field)} (or {environment_variable(field)})"
                message = f"{names} is {problem['input']!r}: {message}"
            print(f"tessera {command}: error: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def _fail(message: str, command: str = "serve") -> NoReturn:
    print(f"tessera {command}: error: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
