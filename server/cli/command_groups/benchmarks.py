"""The commands `bench serve` and `bench engine`."""
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

from server.cli.command_groups.shared import local_engine, settings_flags
from server.cli.output import fail

if TYPE_CHECKING:
    from server.cli.command_groups.command import Invocation
    from server.cli.parsing.parser import Parser


def bench_serve_flags(parser: Parser) -> None:
    """Add the flags of `tessera bench serve`."""
    from server.cli.bench.serve.options import add_flags

    add_flags(parser)


def bench_serve(call: Invocation) -> None:
    """Run `tessera bench serve`."""
    from server.cli.bench.serve import command

    command.main(call.options, call.arguments[2:])


def bench_engine_flags(parser: Parser) -> None:
    """Add the flags of `tessera bench engine`."""
    from server.cli.bench.engine.options import add_flags

    add_flags(parser)
    settings_flags(parser)


def bench_engine(call: Invocation) -> None:
    """Run `tessera bench engine`."""
    from model.errors import ModelError
    from server.cli.bench.engine.options import shape_folder
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "bench engine")
    given = settings.model_fields_set
    if shape := shape_folder(settings.model):
        changes = {"model": str(shape), "load_format": "dummy"}
        settings = settings.model_copy(update=changes)
    config = local_engine(settings, "bench engine")
    from server.cli.bench.engine import command as engine_command

    try:
        engine_command.main(call.arguments[2:], call.options, config, given, call.began)
    except ModelError as error:
        fail(str(error), "bench engine")
