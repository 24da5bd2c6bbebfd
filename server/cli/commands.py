"""The commands: their flags, their help and what they run.

The imports of a command are inside its functions, because each costs time that the other commands do not have to spend;
those of `serve` and of errors in its settings must stay fast, and PyTorch takes seconds.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.cli.parsing.parser import Parser

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from server.cli.settings import Settings
    from server.engine.core.messages import EngineConfig

_ENVIRONMENT = """\
Each flag of a setting is an environment variable too: --max-model-len is TESSERA_MAX_MODEL_LEN. \
A flag overrides the variable. Flags of true or false may be given without a value, or as --no-..."""
_EXAMPLES = """\
examples:
  tessera serve                      the bundled code model on port 8000
  tessera serve Qwen/Qwen3-0.6B      a model of the Hugging Face Hub
  tessera run Qwen/Qwen3-0.6B        talk to a model
  tessera chat                       talk to the service
  tessera complete 'def fib(n):'     continue a text
  tessera plan --arch h100           the kernels that a GPU would run, and why
  tessera doctor                     whether this machine can run the service

`tessera COMMAND --help` explains the flags of a command."""
DEFAULT_TOKENS = 256
"""Most tokens of a continuation; OpenAI's default of 16 ends most texts in a word."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """What a command runs with.

    Attributes:
        options: the parsed flags.
        arguments: all arguments after `tessera`.
        began: `time.perf_counter()` at the start of the process.
        engine: an engine process that is starting already; None if there is none.
    """

    options: argparse.Namespace
    arguments: Sequence[str]
    began: float
    engine: subprocess.Popen[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table of commands.

    Attributes:
        summary: one line for the list of commands.
        add_flags: completes the command's parser.
        run: runs the command; None for a group of commands.
        description: of its help text; empty for the summary.
        usage: words after the command's name.
        aliases: other names of the command.
    """

    summary: str
    add_flags: Callable[[Parser], None]
    run: Callable[[Invocation], None] | None
    description: str = ""
    usage: str = "[flags]"
    aliases: tuple[str, ...] = ()


def main(
    arguments: Sequence[str], began: float, engine: subprocess.Popen[bytes] | None = None
) -> None:
    """Run the command that the arguments name.

    Args:
        arguments: without the program's name.
        began: `time.perf_counter()` at the start of the process.
        engine: an engine process that is starting already, for `serve`. The caller ends it if it is not used.
    """
    parser = command_parser(arguments)
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    _answer_other_words(parser, arguments[0])
    options = parser.parse_args(arguments)
    options.run(Invocation(options, arguments, began, engine))


def command_parser(arguments: Sequence[str] | None) -> Parser:
    """Return the parser of the whole command line.

    Args:
        arguments: only the command that they name has its flags, which takes less time; None for all commands.
    """
    parser = Parser(
        prog="tessera",
        usage="tessera COMMAND ...",
        description="Serve text from decoder models, on flash-attention kernels of its own.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(*VERSION_FLAGS, nargs=0, action=_Version, help="print the version and exit")
    _add_commands(parser, COMMANDS, "command", arguments)
    return parser


def _answer_other_words(parser: Parser, word: str) -> None:
    """Exit with a message if a word is no command, but what it should be is known."""
    known = {name for it, command in COMMANDS.items() for name in (it, *command.aliases)}
    if word in known or word in VERSION_FLAGS:
        return
    from server.cli.other_words import answer

    if message := answer(word, known):
        parser.error(message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _print_version()
        parser.exit()


def _add_commands(
    parser: Parser,
    commands: dict[str, Command],
    kind: str,
    arguments: Sequence[str] | None,
    *,
    required: bool = True,
) -> None:
    group = parser.add_subparsers(
        title=f"{kind}s", dest=kind, metavar=kind.upper(), prog=parser.prog, required=required
    )
    for name, command in commands.items():
        child = group.add_parser(
            name,
            aliases=command.aliases,
            help=command.summary,
            description=command.description
            or command.summary[0].upper() + command.summary[1:] + ".",
            usage=f"{parser.prog} {name} {command.usage}",
        )
        if command.run is not None:
            child.set_defaults(run=command.run)
        if arguments is None or {name, *command.aliases} & set(arguments[:1]):
            command.add_flags(child)


def _add_settings(parser: Parser) -> None:
    from server.cli.parsing.setting_flags import add_settings

    parser.epilog = "\n\n".join(filter(None, (parser.epilog, _ENVIRONMENT)))
    add_settings(parser)


def _serve(call: Invocation) -> None:
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "serve")
    from server.cli.serve import serve

    serve(settings, spawned=call.engine, began=call.began)


def _run_flags(parser: Parser) -> None:
    from server.cli.client import options

    _add_settings(parser)
    parser.add_argument(
        "prompt",
        nargs="?",
        metavar="PROMPT",
        help="to answer once, - for standard input; without one, a conversation",
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions for the whole conversation")
    options.add_answer_flags(parser)


def _run(call: Invocation) -> None:
    from server.cli.command_settings import settings_of
    from server.cli.parsing.parser import PEERS
    from server.cli.parsing.setting_flags import MODEL, given_settings

    options = call.options
    of_peers = getattr(options, PEERS, None)  # such as -m
    by_flag = given_settings(options).keys() | (of_peers.given if of_peers is not None else {})
    if options.prompt is None and MODEL in by_flag:
        # `tessera run --model MODEL PROMPT`
        options.prompt, options.model = options.model, None
    settings = settings_of(options, "run")
    from server.cli.run.command import run

    run(options, settings, DEFAULT_TOKENS)


def _pull_flags(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="of the Hugging Face Hub")
    parser.add_argument("--revision", metavar="REVISION", help="branch, tag or commit")


def _pull(call: Invocation) -> None:
    from server.cli.local_models import commands

    commands.pull(call.options)


def _list_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def _list(call: Invocation) -> None:
    from server.cli.local_models import commands

    commands.list_models(call.options)


def _remove_flags(parser: Parser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="in the Hugging Face cache")
    parser.add_argument(
        "--revision", metavar="REVISION", help="branch, tag or commit; default: all"
    )


def _remove(call: Invocation) -> None:
    from server.cli.local_models import commands

    commands.remove(call.options)


def _running_flags(parser: Parser) -> None:
    from server.cli.client import options

    parser.add_argument("target", nargs="?", metavar="URL", help="the same as --url")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options.add_server_flags(parser)


def _running(call: Invocation) -> None:
    from server.cli.client import running

    running.main(call.options)


def _version_flags(_: Parser) -> None:
    """Add nothing: the command has no flags."""


def _version(_: Invocation) -> None:
    _print_version()


def _print_version() -> None:
    from server.cli.output import write_result
    from server.version import version

    write_result(version())


def _help_flags(parser: Parser) -> None:
    parser.add_argument("words", nargs="*", metavar="COMMAND", help="to explain; default: all")


def _help(call: Invocation) -> None:
    main([*call.options.words, "--help"], call.began)


def _chat_flags(parser: Parser) -> None:
    from server.cli.client import chat, options

    chat.add_words(parser)
    options.add_flags(parser)


def _chat(call: Invocation) -> None:
    from server.cli.client import chat

    chat.main(call.options)


def _complete_flags(parser: Parser) -> None:
    from server.cli.client import complete, options

    complete.add_words(parser)
    options.add_flags(parser)


def _complete(call: Invocation) -> None:
    from server.cli.client import complete

    call.options.max_tokens = call.options.max_tokens or DEFAULT_TOKENS
    complete.main(call.options)


def _completion_flags(parser: Parser) -> None:
    from server.cli.completion import SHELLS

    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _completion(call: Invocation) -> None:
    from server.cli.completion import completion_script

    print(completion_script(command_parser(None), call.options.shell))


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


def _plan_flags(parser: Parser) -> None:
    use = "processor to plan for; default: this machine's"
    _add_arch(parser, "--arch", use, has_cpu=True)
    parser.add_argument("--json", action="store_true", help="print the reply of GET /plan")
    _add_settings(parser)


def _plan(call: Invocation) -> None:
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "plan")
    folder = _configuration(settings, call.options.arch, "--arch", "plan")
    from server.cli.plan import command as plan_command

    plan_command.plan(call.options, settings, folder)


def _configuration(settings: Settings, arch: str | None, flag: str, command: str) -> Path:
    """Return the folder with the model's configuration; exits with status 1 if there is none, or no GPU to plan for.

    Args:
        settings: of the service.
        arch: key of a known processor; None for this machine's.
        flag: that names one.
        command: its name, for messages.
    """
    from model.checkpoint.config import ModelConfig
    from model.checkpoint.hub import resolve
    from model.errors import ModelError
    from server.cli.bench.engine.options import shape_folder
    from server.cli.command_settings import fail
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
        ModelConfig.from_folder(folder)
    except ModelError as error:
        fail(str(error), command)
    return folder


def _size_flags(parser: Parser) -> None:
    from server.cli.parsing.values import checked, count

    _add_arch(parser, "--gpu", "GPU to plan for; default: this machine's")
    for name, tokens, of in (("--input-len", 1024, "a prompt"), ("--output-len", 256, "an answer")):
        parser.add_argument(
            name, type=checked(count), default=tokens, metavar="N", help=f"tokens of {of}; default: {tokens}",
        )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    _add_settings(parser)


def _size(call: Invocation) -> None:
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "size")
    folder = _configuration(settings, call.options.gpu, "--gpu", "size")
    from server.cli.size import command

    command.main(call.options, settings, folder)


def _warm_up_flags(parser: Parser) -> None:
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
    _add_settings(parser)


def _warm_up(call: Invocation) -> None:
    from model.checkpoint.config import ModelConfig
    from server.cli.command_settings import engine_config, fail, settings_of
    from server.engine.core.start_checks import StartupError, check_start

    settings, arch = settings_of(call.options, "warmup"), call.options.arch
    if arch is None and call.options.output is not None:
        fail("--output needs --arch", "warmup", status=2)
    if call.options.output == "":
        fail("--output '' names no folder", "warmup", status=2)
    if arch is None:
        config = _local_engine(settings, "warmup")
        from server.cli import warmup as warmup_command

        warmup_command.warm_up(config, call.began)
        return
    if settings.device == "cpu":
        fail(f"--device cpu: --arch {arch} is a GPU; use --device cuda or auto", "warmup")
    folder = _configuration(settings, arch, "--arch", "warmup")
    # The folder that the service is to read may be the one that this command makes.
    config = engine_config(settings.model_copy(update={"compiled_kernels": None}), folder)
    try:
        check_start(config, ModelConfig.from_folder(folder), has_gpu=True)
    except StartupError as error:
        fail(str(error), "warmup")
    from server.cli import warmup as warmup_command

    warmup_command.compile_ahead(config, arch, call.options.output, call.began)


def _doctor_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    _add_settings(parser)


def _doctor(call: Invocation) -> None:
    from server.cli.command_settings import settings_of

    settings = settings_of(call.options, "doctor")
    from server.cli.doctor import command

    command.main(call.options, settings)


def _bench_flags(parser: Parser) -> None:
    kinds = " or ".join(f"{name} ({kind.summary})" for name, kind in BENCHMARKS.items())
    missing = f"the following arguments are required: KIND, which is {kinds}"
    parser.set_defaults(run=lambda _: parser.error(missing))
    parser.epilog = "`tessera bench KIND --help` explains the flags of a kind."
    # Both kinds get their flags: there are two, and only people wait for them.
    _add_commands(parser, BENCHMARKS, "kind", None, required=False)


def _bench_serve_flags(parser: Parser) -> None:
    from server.cli.bench.serve.options import add_flags

    add_flags(parser)


def _bench_serve(call: Invocation) -> None:
    from server.cli.bench.serve import command

    command.main(call.options, call.arguments[2:])


def _bench_engine_flags(parser: Parser) -> None:
    from server.cli.bench.engine.options import add_flags

    add_flags(parser)
    _add_settings(parser)


def _bench_engine(call: Invocation) -> None:
    from model.errors import ModelError
    from server.cli.bench.engine.options import shape_folder
    from server.cli.command_settings import fail, settings_of

    settings = settings_of(call.options, "bench engine")
    given = settings.model_fields_set
    if shape := shape_folder(settings.model):
        changes = {"model": str(shape), "load_format": "dummy"}
        settings = settings.model_copy(update=changes)
    config = _local_engine(settings, "bench engine")
    from server.cli.bench.engine import command as engine_command

    try:
        engine_command.main(call.arguments[2:], call.options, config, given, call.began)
    except ModelError as error:
        fail(str(error), "bench engine")


def _local_engine(settings: Settings, command: str) -> EngineConfig:
    """Prepare this process for an engine and return its configuration; exits with status 1 if it cannot start."""
    from model.errors import ModelError
    from server.cli.command_settings import engine_config, fail, find_model
    from server.cli.model_name import with_model_name
    from server.engine.core.start_checks import StartupError
    from server.engine.link.engine_process.process_setup import set_passive_openmp_wait
    from server.log import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    set_passive_openmp_wait()
    try:
        settings = with_model_name(settings)
        folder, _ = find_model(settings)
    except (ModelError, StartupError) as error:
        fail(str(error), command)
    return engine_config(settings, folder)


VERSION_FLAGS = ("-V", "-v", "--version")
_SETTINGS_USAGE = "[MODEL] [flags]"
BENCHMARKS = {
    "serve": Command(
        "any server, over HTTP, as a client",
        _bench_serve_flags,
        _bench_serve,
        "Load a server with streamed requests and report latencies, rates and errors.",
    ),
    "engine": Command(
        "the engine here, without HTTP",
        _bench_engine_flags,
        _bench_engine,
        "Measure the engine in this process, without HTTP.",
        _SETTINGS_USAGE,
    ),
}
COMMANDS = {
    "serve": Command(
        "serve a model over HTTP",
        _add_settings,
        _serve,
        usage=_SETTINGS_USAGE,
    ),
    "run": Command(
        "talk to a model here, or ask it once",
        _run_flags,
        _run,
        "Talk to a model: answer the prompt, or what is on standard input, or hold a conversation. A service with this "
        "model at --host and --port is used unless other settings are given; else one is started on a free port, and "
        "ends with the command. A model without a chat template continues texts.",
        "[MODEL] [PROMPT] [flags]",
    ),
    "pull": Command(
        "download a model",
        _pull_flags,
        _pull,
        "Download a model of the Hugging Face Hub into its cache and print the folder. A model that is not supported "
        "is refused before its weights are downloaded.",
        "MODEL [flags]",
    ),
    "list": Command(
        "list the models on this machine",
        _list_flags,
        _list,
        "List the bundled model and those in the cache of the Hugging Face Hub, with their size, revisions, last use, "
        "and whether they can be served.",
        aliases=("ls",),
    ),
    "rm": Command(
        "delete models from this machine",
        _remove_flags,
        _remove,
        "Delete models, or a revision of them, from the cache of the Hugging Face Hub, which other programs use too.",
        "MODEL ... [flags]",
    ),
    "ps": Command(
        "show the model, state and load of a running server",
        _running_flags,
        _running,
        "Show which model a running service has, its state, and how many requests run and wait.",
        "[URL] [flags]",
    ),
    "chat": Command(
        "talk to the model of a running server",
        _chat_flags,
        _chat,
        "Hold a conversation with a running server that has OpenAI's API; answers are streamed. "
        "Ctrl-C stops an answer, /new begins a new conversation, Ctrl-D ends. If standard input "
        "is not a terminal, all of it is one message.",
        "[URL|MODEL] [flags]",
    ),
    "complete": Command(
        "continue a text with the model of a running server",
        _complete_flags,
        _complete,
        "Continue a text with a running server; the continuation is streamed to standard output. "
        "A single word that is no URL is the prompt. Without a prompt, or with -, standard input "
        f"is. At most {DEFAULT_TOKENS} tokens unless --max-tokens is given.",
        "[URL|MODEL] [PROMPT] [flags]",
    ),
    "plan": Command(
        "show which attention kernels a GPU would run, and why",
        _plan_flags,
        _plan,
        "Show which attention kernels run for a model on a GPU, how they are launched, and why. "
        "--model, --revision, --device, --dtype, --quantization, --kv-cache-dtype and "
        "--block-size affect the plan; the other settings are accepted. MODEL may also be a shape of "
        "`tessera bench engine`.",
        _SETTINGS_USAGE,
    ),
    "size": Command(
        "estimate how many sequences fit on a GPU, and how fast they are",
        _size_flags,
        _size,
        "Estimate the memory of weights, activations and KV cache, how many sequences of a length "
        "fit, and the speed by the GPU's bandwidth and arithmetic. The GPU may be absent. --model, "
        "--dtype, --quantization and the settings of memory affect the estimate. MODEL may also be "
        "a shape of `tessera bench engine`.",
        _SETTINGS_USAGE,
    ),
    "warmup": Command(
        "fill the cache of compiled kernels for `serve`",
        _warm_up_flags,
        _warm_up,
        "Start an engine and end it, so that the next start finds its kernels compiled. With "
        "--arch, compile them on a machine without that GPU; the model may then also be a shape "
        "of `tessera bench engine`, and all settings that change kernels should be those of "
        "the service.",
        _SETTINGS_USAGE,
    ),
    "doctor": Command(
        "check whether this machine can run the service",
        _doctor_flags,
        _doctor,
        "Check driver, GPU, compiler, caches, port and limits for a service with these settings, of "
        "which --host, --port and --device matter. One line for each check: ok, warning or error, "
        "and what to do. The exit status is 1 if there is an error.",
    ),
    "bench": Command(
        "measure a server, or the engine",
        _bench_flags,
        None,
        "Measure how fast it is.",
        "KIND ...",
    ),
    "completion": Command(
        "print a script that completes commands and flags in a shell",
        _completion_flags,
        _completion,
        "Print a script that completes the commands and flags of tessera.\n\n"
        '  bash   eval "$(tessera completion bash)" in ~/.bashrc\n'
        "  zsh    tessera completion zsh > a folder of $fpath, as _tessera\n"
        "  fish   tessera completion fish > ~/.config/fish/completions/tessera.fish",
        "SHELL",
    ),
    "version": Command("print the version", _version_flags, _version),
    "help": Command(
        "explain a command", _help_flags, _help, "Explain a command and its flags.", "[COMMAND]"
    ),
}  # fmt: skip
