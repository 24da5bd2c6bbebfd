"""The table of commands: help texts, misspelled names, and what is imported."""

import subprocess
import sys

import pytest

from server.cli import commands
from server.cli.settings import Settings, flag

ALL = [*([name] for name in commands.COMMANDS), *(["bench", kind] for kind in commands.BENCHMARKS)]
WITH_SETTINGS = (
    ["serve"],
    ["run"],
    ["plan"],
    ["size"],
    ["warmup"],
    ["doctor"],
    ["bench", "engine"],
)


@pytest.mark.parametrize("flags", [["plan", "--arch"], ["size", "--gpu"], ["warmup", "--arch"]])
def test_a_processor_may_have_any_of_its_names(tessera, flags):
    status, _, err = tessera(*flags, "V100")
    assert (status, "V100 is older than sm_75" in err, err.count("\n")) == (2, True, 1)

    status, _, err = tessera(*flags, "h1oo")
    assert (status, "'h1oo' is none of " in err) == (2, True)
    assert ("cpu, " in err) == (flags[0] == "plan")


def test_a_group_of_commands_alone_names_its_commands(tessera):
    _, _, err = tessera("bench")

    assert all(f"{name} (" in err for name in commands.BENCHMARKS)
    assert err.count("\n") == 1


def test_without_a_command_the_help_is_shown_and_the_status_is_2(tessera):
    status, out, err = tessera()

    assert (status, out) == (2, "")
    for name in commands.COMMANDS:
        assert name in err


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("words", [[], *ALL], ids=" ".join)
def test_every_help_fits_the_terminal_and_100_columns(tessera, monkeypatch, words, columns):
    monkeypatch.setenv("COLUMNS", str(columns))

    status, out, _ = tessera(*words, "--help")

    assert status == 0
    assert out.startswith(f"usage: {' '.join(['tessera', *words])} ")
    assert max(map(len, out.splitlines())) <= min(columns, 100)


@pytest.mark.parametrize("words", WITH_SETTINGS, ids=" ".join)
def test_the_help_explains_every_setting_in_a_group_with_its_default(tessera, words):
    _, out, _ = tessera(*words, "--help")

    for name, field in Settings.model_fields.items():
        (line, *_) = [ln for ln in out.splitlines() if ln.startswith(f"  {flag(name)} ")]
        text = " ".join(out.partition(line)[2].partition("\n  --")[0].split())
        assert "default" in line + text or field.default in (None, ())
    for group in ("model:", "HTTP:", "engine:", "memory:", "process:"):
        assert f"\n{group}\n" in out
    assert "TESSERA_MAX_MODEL_LEN" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sevre"], "tessera: error: unknown command 'sevre'; did you mean serve?"),
        (["bench", "srve"], "tessera bench: error: unknown kind 'srve'; did you mean serve?"),
        (["plan", "--acrh=h100"], "tessera plan: error: unknown flag --acrh; did you mean --arch?"),
        (["bench", "serve", "--ulr=x"], "tessera bench serve: error: unknown flag --ulr; did you"),
        (["chat", "--sytem=x"], "tessera chat: error: unknown flag --sytem; did you mean --system"),
        (["--verison"], "tessera: error: "),
        (["bench"], "tessera bench: error: the following arguments are required: KIND"),
    ],
    ids=" ".join,
)
def test_a_misspelled_word_is_an_error_of_one_line(tessera, arguments, words):
    status, out, err = tessera(*arguments)

    assert (status, out) == (2, "")
    assert err.startswith(words)
    assert err.count("\n") == 1


@pytest.mark.parametrize("word", ["--version", "-V", "-v", "version"])
def test_the_version_is_printed(tessera, word):
    from server.version import version

    assert tessera(word) == (0, f"{version()}\n", "")


@pytest.mark.parametrize("words", [[], ["plan"], ["bench", "serve"]], ids=" ".join)
def test_help_as_a_command_is_the_same_as_the_flag(tessera, words):
    assert tessera("help", *words) == tessera(*words, "--help")


def test_a_command_has_its_flags_under_its_other_name_too(tessera):
    assert "--json" in tessera("ls", "--help")[1]


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "tessera"],
        ["-c", "from tessera.server.cli.main import main; main()"],
        ["-c", "from tessera.server.cli.main import serve_main; serve_main()"],
    ],
    ids=["-m tessera", "tessera", "tessera-server"],
)
def test_every_way_to_start_the_program_serves(program):
    words = [] if "serve_main" in program[1] else ["serve"]
    done = subprocess.run(
        [sys.executable, *program, *words, "--port=x"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stderr.startswith("tessera serve: error: --port (or TESSERA_PORT) is 'x'")


def imported(*arguments):
    """Return the modules that a command has imported when it ends, with its status."""
    code = (
        "import sys, server.cli.main\n"
        "try: server.cli.main.main(sys.argv[1:])\n"
        "except SystemExit as end: print('status', end.code)\n"
        "print('modules', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    )
    *_, status, modules = done.stdout.splitlines()
    return status, set(modules.split()), done.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["serve", "--help"], ["plan", "--help"], *ALL], ids=" ".join
)
def test_help_and_the_parsing_of_flags_do_not_import_pytorch(words):
    assert "torch" not in imported(*words, "--unknown-flag")[1]


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["serve"], ["--port=x"]),
        (["serve"], ["--model=/no/such"]),
        (["serve"], ["--quantization=fp8", "--device=cpu"]),
        (["serve"], ["--max-model-len=100000"]),
        (["serve"], ["--kv-cache-gib=1e-9", "--device=cpu"]),
        (["bench", "engine"], ["--max-model-len=100000"]),
        (["warmup"], ["--max-model-len=100000"]),
        (["warmup"], ["--max-model-len=100000", "--arch=h100"]),
        (["warmup"], ["--tensor-parallel=3", "--arch=h100"]),
        (["warmup"], ["--quantization=int8", "--arch=h100"]),
        (["warmup"], ["--device=cpu", "--arch=h100"]),
        (["plan"], ["--model=/no/such"]),
        (["run"], ["--model=/no/such"]),
        (["run"], ["--max-model-len=100000"]),
    ],
    ids=" ".join,
)
def test_a_mistake_that_can_be_known_before_is_reported_without_pytorch(words, flags):
    status, modules, err = imported(*words, *flags)

    assert status in ("status 1", "status 2")
    assert "torch" not in modules
    assert err.startswith(f"tessera {' '.join(words)}: error: ")
    assert flags[0].partition("=")[0].removeprefix("--model=") in err or "/no/such" in err
