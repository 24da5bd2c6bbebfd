"""The command `replay`."""
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

from server.cli.command_groups.shared import local_engine, settings_flags

if TYPE_CHECKING:
    from server.cli.command_groups.command import Invocation
    from server.cli.parsing.parser import Parser


def replay_flags(parser: Parser) -> None:
    """Add the flags of `tessera replay`."""
    from server.cli.parsing.values import checked
    from server.client.address import read_url

    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="with a receipt, or with many one after the other, or with replies or events that have them; - for "
        "standard input",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print only the outputs that differ, and the last line"
    )
    parser.add_argument(
        "--url",
        type=checked(read_url),
        metavar="URL",
        help="of a running service that computes in place of an engine in this process, with its own settings",
    )
    parser.add_argument(
        "--allow-download",
        action="store_true",
        help="let the engine's model be downloaded if a receipt names one that is not on this machine",
    )
    settings_flags(parser, has_model=False)


def replay(call: Invocation) -> None:
    """Run `tessera replay`."""
    from server.cli.client.options import target_of
    from server.cli.command_settings import settings_of
    from server.cli.replay import command
    from server.cli.settings import flag

    settings = settings_of(call.options, command.COMMAND)
    if call.options.url is not None:
        key = next(iter(settings.api_key), None)
        given = settings.model_fields_set - {"api_key"}
        unused = [*map(flag, given), *["--allow-download"] * call.options.allow_download]
        command.replay_there(call.options, target_of(call.options.url, key), unused)
        return
    command.replay_here(call.options, settings, lambda it: local_engine(it, command.COMMAND))
