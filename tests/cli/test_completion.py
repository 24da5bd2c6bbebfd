"""The completion scripts, run by the shells themselves."""

import shutil
import subprocess

import pytest

from server.cli import commands
from server.cli.commands import command_parser
from server.cli.completion import SHELLS, completion_script
from tests.waiting import GIVE_UP

BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
spec=$(complete -p tessera); spec=${spec#*-F }
"${spec%% *}" tessera "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (folder / shell).write_text(completion_script(command_parser(None), shell))
    return folder


@pytest.fixture
def complete(scripts, tmp_path):
    """Return a function: the words that bash offers for the last word of a command line."""

    def offered(*words):
        done = subprocess.run(
            ["bash", "--norc", "-c", BASH, "bash", str(scripts / "bash"), "tessera", *words],
            capture_output=True, text=True, check=True, cwd=tmp_path, timeout=GIVE_UP,
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split()

    return offered


COMMANDS = [name for it, command in commands.COMMANDS.items() for name in (it, *command.aliases)]


@needs("bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ([""], COMMANDS),
        (["comp"], ["complete", "completion"]),
        (["bench", ""], ["serve", "engine"]),
        (["completion", ""], list(SHELLS)),
        (["serve", "--dev"], ["--device"]),
        (["serve", "--device", ""], ["auto", "cpu", "cuda"]),
        (["serve", "org/name", "--port", "9", "--dtype", "b"], ["bfloat16"]),
        (["serve", "--overlap", ""], ["true", "false"]),
        (["plan", "--arch", "h"], ["h100", "h200"]),
        (["bench", "engine", "--work"], ["--workloads"]),
        (["complete", "--max"], ["--max-tokens"]),
    ],
)
def test_bash_completes_commands_flags_and_values(complete, words, offered):
    assert complete(*words) == offered


@needs("bash")
def test_bash_completes_folders_for_the_model(complete, tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checks.txt").touch()

    assert complete("serve", "che") == ["checkpoint"]
    assert complete("serve", "--model", "che") == ["checkpoint"]


@needs("fish")
def test_fish_completes_commands_flags_and_values(scripts):
    def offered(line):
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source {scripts / 'fish'}; complete -C {line!r}"],
            capture_output=True, text=True, check=True, timeout=GIVE_UP,
        )  # fmt: skip
        return [found.split("\t")[0] for found in done.stdout.splitlines()]

    assert set(COMMANDS) <= set(offered("tessera "))
    assert offered("tessera serve --dev") == ["--device"]
    assert offered("tessera serve --device c") == ["cpu", "cuda"]


@needs("zsh")
def test_zsh_accepts_the_script(scripts):
    assert (scripts / "zsh").read_text().startswith("#compdef tessera\n")
    subprocess.run(["zsh", "-n", str(scripts / "zsh")], check=True, timeout=GIVE_UP)


def test_an_unknown_shell_is_refused_with_the_known_ones(tessera):
    status, out, err = tessera("completion", "tcsh")

    assert (status, out) == (2, "")
    assert "bash, zsh, fish" in err


def test_the_command_prints_the_script(tessera):
    assert tessera("completion", "bash")[:2] == (
        0, completion_script(command_parser(None), "bash") + "\n",
    )  # fmt: skip
