"""The commands for the models on this machine: `pull`, `list`, `rm` and `merge`."""
# ruff: noqa: PLC0415

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.cli.command_groups.command import Invocation
    from server.cli.parsing.parser import Parser


def pull_flags(parser: Parser) -> None:
    """Add the flags of `tessera pull`."""
    parser.add_argument("model", metavar="MODEL", help="of the Hugging Face Hub")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit")
    parser.add_argument(
        "--load-format",
        choices=("auto", "safetensors", "pickle"),
        default="auto",
        help="pickle downloads pytorch_model.bin where there are no safetensors files; default: auto",
    )


def pull(call: Invocation) -> None:
    """Run `tessera pull`."""
    from server.cli.local_models import commands

    commands.pull(call.options)


def merge_flags(parser: Parser) -> None:
    """Add the flags of `tessera merge`."""
    parser.add_argument("model", metavar="MODEL", help="folder or model of the Hugging Face Hub")
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        help="its LoRA adapter of PEFT, likewise a folder or of the Hub",
    )
    parser.add_argument(
        "folder", metavar="FOLDER", help="to write, which must not exist or be empty"
    )


def merge(call: Invocation) -> None:
    """Run `tessera merge`."""
    from server.cli.local_models import merge

    merge.merge(call.options)


def list_flags(parser: Parser) -> None:
    """Add the flags of `tessera list`."""
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def list_models(call: Invocation) -> None:
    """Run `tessera list`."""
    from server.cli.local_models import commands

    commands.list_models(call.options)


def remove_flags(parser: Parser) -> None:
    """Add the flags of `tessera rm`."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="in the Hugging Face cache")
    parser.add_argument(
        "--revision", metavar="REVISION", help="branch, tag or commit; default: all"
    )


def remove(call: Invocation) -> None:
    """Run `tessera rm`."""
    from server.cli.local_models import commands

    commands.remove(call.options)
