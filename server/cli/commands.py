"""Parses the command line and runs the command that it names."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from model.checkpoint.hub import resolve
from model.errors import ModelError
from server.cli.command_settings import engine_config, fail, read_settings
from server.cli.serve import serve
from server.engine.link.process_setup import set_passive_openmp_wait
from server.log import configure_logging
from server.version import version

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str], began: float) -> None:
    """Run the command that the arguments name.

    Args:
        arguments: without the program's name.
        began: `time.perf_counter()` at the start of the command.
    """
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
        serve(read_settings(rest), began=began)
    elif command.command == "bench":
        _bench(rest)
    elif command.command == "warmup":
        _warm_up(rest, began)
    else:
        # Imported here because it imports PyTorch; `serve` must not.
        from server.cli import plan as plan_command  # noqa: PLC0415

        options, rest = plan_command.read_options(rest)
        plan_command.plan(options, read_settings(rest, "plan"))


def _warm_up(arguments: list[str], began: float) -> None:
    settings = read_settings(arguments, "warmup")
    configure_logging(settings.log_level, settings.log_format)
    set_passive_openmp_wait()
    from server.cli import warmup as warmup_command  # noqa: PLC0415 - PyTorch

    try:
        config = engine_config(settings, resolve(settings.model, settings.revision))
    except ModelError as error:
        fail(str(error), "warmup")
    warmup_command.warm_up(config, began)


def _bench(arguments: list[str]) -> None:
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
        # Imported here because no other command needs it.
        from server.cli.bench.serve import command as serve_command  # noqa: PLC0415

        serve_command.main(rest)
    else:
        _bench_engine(rest)


def _bench_engine(arguments: list[str]) -> None:
    began = time.perf_counter()
    # Read the options before importing PyTorch, which takes seconds.
    from server.cli.bench.engine.options import SHAPES, read_options, shapes  # noqa: PLC0415

    options, rest = read_options(arguments)
    settings = read_settings(rest, "bench engine")
    if settings.model in shapes():
        changes = {"model": str(SHAPES / settings.model), "load_format": "dummy"}
        settings = settings.model_copy(update=changes)
    configure_logging(settings.log_level, settings.log_format)
    set_passive_openmp_wait()
    from server.cli.bench.engine import command as engine_command  # noqa: PLC0415 - PyTorch

    try:
        config = engine_config(settings, resolve(settings.model, settings.revision))
        engine_command.main(arguments, options, config, settings.model_fields_set, began)
    except ModelError as error:
        fail(str(error), "bench engine")
