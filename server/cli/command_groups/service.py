"""The commands `serve` and `doctor`."""
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

from server.cli.command_groups.shared import settings_flags

if TYPE_CHECKING:
    from server.cli.command_groups.command import Invocation
    from server.cli.parsing.parser import Parser


def serve(call: Invocation) -> None:
    """Run `tessera serve`."""
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "serve")
    from server.cli.serve import serve as serve_until_stopped

    serve_until_stopped(settings, spawned=call.engine, began=call.began)


def doctor_flags(parser: Parser) -> None:
    """Add the flags of `tessera doctor`."""
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    settings_flags(parser)


def doctor(call: Invocation) -> None:
    """Run `tessera doctor`."""
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "doctor")
    from server.cli.doctor import command

    command.main(call.options, settings)
