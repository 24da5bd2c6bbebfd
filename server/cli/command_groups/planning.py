"""The commands about a GPU that may be absent: `plan`, `size` and `warmup`."""
# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from server.cli.command_groups.shared import local_engine, settings_flags
from server.cli.output import fail

if TYPE_CHECKING:
    from pathlib import Path

    from server.cli.command_groups.command import Invocation
    from server.cli.parsing.parser import Parser
    from server.cli.settings import Settings


def plan_flags(parser: Parser) -> None:
    """Add the flags of `tessera plan`."""
    use = "processor to plan for; default: this machine's"
    _add_arch(parser, "--arch", use, has_cpu=True)
    parser.add_argument("--json", action="store_true", help="print the reply of GET /plan")
    settings_flags(parser)


def plan(call: Invocation) -> None:
    """Run `tessera plan`."""
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "plan")
    folder = _configuration(settings, call.options.arch, "--arch", "plan")
    from server.cli.plan import command as plan_command

    plan_command.plan(call.options, settings, folder)


def size_flags(parser: Parser) -> None:
    """Add the flags of `tessera size`."""
    from server.cli.parsing.values import checked, count

    _add_arch(parser, "--gpu", "GPU to plan for; default: this machine's")
    for name, tokens, of in (("--input-len", 1024, "a prompt"), ("--output-len", 256, "an answer")):
        parser.add_argument(
            name, type=checked(count), default=tokens, metavar="N", help=f"tokens of {of}; default: {tokens}",
        )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    settings_flags(parser)


def size(call: Invocation) -> None:
    """Run `tessera size`."""
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "size")
    folder = _configuration(settings, call.options.gpu, "--gpu", "size")
    from server.cli.size import command

    command.main(call.options, settings, folder)


def warm_up_flags(parser: Parser) -> None:
    """Add the flags of `tessera warmup`."""
    _add_arch(
        parser,
        "--arch",
        "GPU to compile for, or a compute capability to compile for the listed GPUs that have it; they need not be "
        "present, and no weights are read",
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="with --arch: folder for the kernels, for --compiled-kernels; default: Triton's cache",
    )
    settings_flags(parser)


def warm_up(call: Invocation) -> None:
    """Run `tessera warmup`."""
    from model.checkpoint.config import ModelConfig
    from server.cli.command_settings import engine_config, settings_of
    from server.engine.core.start_checks import StartupError, check_start

    settings, arch = settings_of(call.options, "warmup"), call.options.arch
    if arch is None and call.options.output is not None:
        fail("--output needs --arch", "warmup", status=2)
    if call.options.output == "":
        fail("--output '' names no folder", "warmup", status=2)
    if arch is None:
        config = local_engine(settings, "warmup")
        from server.cli import warmup as warmup_command

        warmup_command.warm_up(config, call.began)
        return
    if settings.device == "cpu":
        fail(f"--device cpu: --arch {arch} is a GPU; use --device cuda or auto", "warmup")
    folder = _configuration(settings, arch, "--arch", "warmup")
    # The folder that the service is to read may be the one that this command makes.
    config = engine_config(settings.model_copy(update={"compiled_kernels": None}), folder)
    try:
        model = ModelConfig.from_folder(folder, settings.model_backend)
        check_start(config, model, has_gpu=True)
    except StartupError as error:
        fail(str(error), "warmup")
    from server.cli import warmup as warmup_command

    warmup_command.compile_ahead(config, arch, call.options.output, call.began)


def _add_arch(parser: Parser, flag: str, use: str, *, has_cpu: bool = False) -> None:
    """Add a flag for a known processor or all of a compute capability, under any of their names."""
    from kernels.arch import CATALOGUE, PROCESSORS
    from kernels.processor_names import CAPABILITIES, UnknownProcessorError, read

    def key(name: str) -> str:
        try:
            return read(name, [key for key in PROCESSORS if has_cpu or key != "cpu"])
        except UnknownProcessorError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    usual = [key for key in CATALOGUE if has_cpu or key != "cpu"]
    others = ", ".join(key for key in PROCESSORS if key not in CATALOGUE)
    parser.add_listed(
        flag,
        (*usual, *CAPABILITIES),
        metavar="NAME",
        type=key,
        help=f"{use}; one of {', '.join((*usual, *CAPABILITIES))}, or of {others}, also as nvidia-smi "
        "writes it",
    )


def _configuration(settings: Settings, arch: str | None, flag: str, command: str) -> Path:
    """Return the folder with the model's configuration; exits with status 1 if there is none, or no GPU to plan for.

    Args:
        settings: of the service.
        arch: key of a known processor; None for this machine's.
        flag: that names one.
        command: its name, for messages.
    """
    from model.checkpoint.config import ModelConfig
    from model.errors import ModelError
    from model.families.unlisted import NAME
    from model.hub.resolve import resolve
    from server.cli.bench.engine.options import shape_folder
    from server.cli.nvidia import may_have_gpu
    from server.engine.core.start_checks import NO_GPU
    from server.log import quiet_libraries

    quiet_libraries()
    if arch is None and settings.device == "cuda" and not may_have_gpu():
        fail(f"{NO_GPU}; use {flag} to plan for a known GPU", command)
    try:
        folder = shape_folder(settings.model) or resolve(
            settings.model, settings.revision, config_only=True
        )
        model = ModelConfig.from_folder(folder, settings.model_backend)
    except ModelError as error:
        fail(str(error), command)
    if model.network.modules is not None and command != "plan":
        fail(f"{NAME}: only `tessera plan` and a service know the modules of its models", command)
    return folder
