"""The table of commands with their help texts, and the parser made of it.

`server.cli.command_groups` has their flags and what they run. Only what is about the table itself is here: `help`,
`completion`, `version` and the group `bench`. Imports are inside functions, as there.
"""
# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from server.cli.command_groups import benchmarks, client, models, planning, replay, service, shared
from server.cli.command_groups.command import Command, Invocation
from server.cli.parsing.parser import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.link.spawn import LinkedProcess

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


def main(arguments: Sequence[str], began: float, engine: LinkedProcess | None = None) -> None:
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
    _answer_unknown_command(parser, arguments[0])
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


def _answer_unknown_command(parser: Parser, word: str) -> None:
    """Exit with a message if a word is no command, but what it should be is known."""
    known = {name for it, command in COMMANDS.items() for name in (it, *command.aliases)}
    if word in known or word in VERSION_FLAGS:
        return
    from server.cli.unknown_commands import answer

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


def _completion_flags(parser: Parser) -> None:
    from server.cli.completion import SHELLS

    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _completion(call: Invocation) -> None:
    from server.cli.completion import completion_script

    print(completion_script(command_parser(None), call.options.shell))


def _bench_flags(parser: Parser) -> None:
    kinds = " or ".join(f"{name} ({kind.summary})" for name, kind in BENCHMARKS.items())
    missing = f"the following arguments are required: KIND, which is {kinds}"
    parser.set_defaults(run=lambda _: parser.error(missing))
    parser.epilog = "`tessera bench KIND --help` explains the flags of a kind."
    # Both kinds get their flags: there are two, and only people wait for them.
    _add_commands(parser, BENCHMARKS, "kind", None, required=False)


VERSION_FLAGS = ("-V", "-v", "--version")
_SETTINGS_USAGE = "[MODEL] [flags]"
BENCHMARKS = {
    "serve": Command(
        "any server, over HTTP, as a client",
        benchmarks.bench_serve_flags,
        benchmarks.bench_serve,
        "Load a server with streamed requests and report latencies, rates and errors.",
    ),
    "engine": Command(
        "the engine here, without HTTP",
        benchmarks.bench_engine_flags,
        benchmarks.bench_engine,
        "Measure the engine in this process, without HTTP.",
        _SETTINGS_USAGE,
    ),
}
COMMANDS = {
    "serve": Command(
        "serve a model over HTTP",
        shared.settings_flags,
        service.serve,
        usage=_SETTINGS_USAGE,
    ),
    "run": Command(
        "talk to a model here, or ask it once",
        client.run_flags,
        client.run,
        "Talk to a model: answer the prompt, or what is on standard input, or hold a conversation. A service with this "
        "model at --host and --port is used unless other settings are given; else one is started on a free port, and "
        "ends with the command. A model without a chat template continues texts.",
        "[MODEL] [PROMPT] [flags]",
    ),
    "pull": Command(
        "download a model",
        models.pull_flags,
        models.pull,
        "Download a model of the Hugging Face Hub into its cache and print the folder. A model that is not supported "
        "is refused before its weights are downloaded.",
        "MODEL [flags]",
    ),
    "list": Command(
        "list the models on this machine",
        models.list_flags,
        models.list_models,
        "List the bundled model and those in the cache of the Hugging Face Hub, with their size, revisions, last use, "
        "and whether they can be served.",
        aliases=("ls",),
    ),
    "rm": Command(
        "delete models from this machine",
        models.remove_flags,
        models.remove,
        "Delete models, or a revision of them, from the cache of the Hugging Face Hub, which other programs use too.",
        "MODEL ... [flags]",
    ),
    "merge": Command(
        "add a LoRA adapter to the weights of its model",
        models.merge_flags,
        models.merge,
        "Write the checkpoint of a model with an adapter added to its weights, which any program can serve.",
        "MODEL ADAPTER FOLDER",
    ),
    "ps": Command(
        "show the model, state and load of a running server",
        client.ps_flags,
        client.ps,
        "Show which model a running service has, its state, and how many requests run and wait.",
        "[URL] [flags]",
    ),
    "chat": Command(
        "talk to the model of a running server",
        client.chat_flags,
        client.chat,
        "Hold a conversation with a running server that has OpenAI's API; answers are streamed. "
        "Ctrl-C stops an answer, /new begins a new conversation, Ctrl-D ends. If standard input "
        "is not a terminal, all of it is one message.",
        "[URL|MODEL] [flags]",
    ),
    "complete": Command(
        "continue a text with the model of a running server",
        client.complete_flags,
        client.complete,
        "Continue a text with a running server; the continuation is streamed to standard output. "
        "A single word that is no URL is the prompt. Without a prompt, or with -, standard input "
        f"is. At most {client.DEFAULT_TOKENS} tokens unless --max-tokens is given.",
        "[URL|MODEL] [PROMPT] [flags]",
    ),
    "plan": Command(
        "show which attention kernels a GPU would run, and why",
        planning.plan_flags,
        planning.plan,
        "Show which attention kernels run for a model on a GPU, how they are launched, and why. "
        "--model, --revision, --device, --dtype, --quantization, --kv-cache-dtype and "
        "--block-size affect the plan; the other settings are accepted. MODEL may also be a shape of "
        "`tessera bench engine`.",
        _SETTINGS_USAGE,
    ),
    "size": Command(
        "estimate how many sequences fit on a GPU, and how fast they are",
        planning.size_flags,
        planning.size,
        "Estimate the memory of weights, activations and KV cache, how many sequences of a length "
        "fit, and the speed by the GPU's bandwidth and arithmetic. The GPU may be absent. --model, "
        "--dtype, --quantization and the settings of memory affect the estimate. MODEL may also be "
        "a shape of `tessera bench engine`.",
        _SETTINGS_USAGE,
    ),
    "warmup": Command(
        "fill the cache of compiled kernels for `serve`",
        planning.warm_up_flags,
        planning.warm_up,
        "Start an engine and end it, so that the next start finds its kernels compiled. With "
        "--arch, compile them on a machine without that GPU; the model may then also be a shape "
        "of `tessera bench engine`, and all settings that change kernels should be those of "
        "the service.",
        _SETTINGS_USAGE,
    ),
    "doctor": Command(
        "check whether this machine can run the service",
        service.doctor_flags,
        service.doctor,
        "Check driver, GPU, compiler, caches, port and limits for a service with these settings, of "
        "which --host, --port and --device matter. One line for each check: ok, warning or error, "
        "and what to do. The exit status is 1 if there is an error.",
    ),
    "replay": Command(
        "compute the replies of receipts again, and compare them",
        replay.replay_flags,
        replay.replay,
        "Compute the replies of receipts again, all together, and say of each output that it is equal or at which "
        "token it differs. A reply has a receipt if its request has `receipt: true`. What computed it then and what "
        "computes now are compared first. The model and its format are those of the receipt unless flags give "
        "others; a model that is not on this machine is downloaded only with --allow-download. "
        "The exit status is 1 if an output differs or a receipt was altered.",
        "FILE ... [flags]",
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
