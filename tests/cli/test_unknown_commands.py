"""Words in the place of the command that are none."""

import re

import pytest

from server.cli import commands
from server.cli.unknown_commands import WORDS

KNOWN = {name for it, command in commands.COMMANDS.items() for name in (it, *command.aliases)}


def test_no_command_is_in_the_table_and_every_command_that_it_names_exists():
    assert not WORDS.keys() & KNOWN
    named = {name for text in WORDS.values() for name in re.findall(r"`tessera ([\w-]+)", text)}
    assert named <= KNOWN
    flags = {flag for text in WORDS.values() for flag in re.findall(r" (--[\w-]+)", text)}
    parser = commands.command_parser(None)
    assert flags <= {name for action in parser.walk() for name in action.option_strings}


@pytest.mark.parametrize("word", [*WORDS, "Server", "run_batch"])
def test_a_command_of_another_program_is_answered_from_the_table(tessera, word):
    status, out, err = tessera(word, "x", "--flag")

    assert (status, out) == (2, "")
    answer = WORDS[word.lower().replace("_", "-")]
    assert err == f"tessera: error: there is no command {word!r}: {answer}\n"


@pytest.mark.parametrize(
    "word",
    [
        "Qwen/Qwen3-0.6B",
        "org/name",
        "qwen3-0.6b",
        "gpt2",
        "hf.co/org/name",
        "https://huggingface.co/org/name",
        "models--org--name",
        "bundled",
    ],
)
def test_a_model_is_answered_with_the_command_that_serves_it(tessera, word):
    status, out, err = tessera(word, "--port=1")

    assert (status, out) == (2, "")
    assert err.startswith(
        f"tessera: error: {word!r} is a model, not a command: `tessera serve {word}`"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("llama3.2:1b", "give meta-llama/Llama-3.2-1B-Instruct"),
        ("mistral", "give mistralai/Mistral-7B-Instruct-v0.3"),
        ("gemma-3-1b", "give google/gemma-3-1b-pt or google/gemma-3-1b-it"),
        ("./absent", "no folder './absent'"),
        ("/absent/model", "no folder '/absent/model'"),
        ("x.gguf", "there is no file 'x.gguf'"),
    ],
)
def test_a_model_that_cannot_be_served_is_answered_with_the_reason_too(tessera, word, says):
    status, out, err = tessera(word)

    assert (status, out) == (2, "")
    assert f"{word!r} is not a command; `tessera serve MODEL` serves a model, but " in err
    assert says in err
    assert err.count("\n") == 1


def test_a_folder_is_a_model_too(tessera, tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)

    assert "`tessera serve checkpoint`" in tessera("checkpoint")[2]


def test_a_flag_before_the_command_says_where_it_belongs(tessera):
    status, _, err = tessera("--model=x", "serve")

    assert status == 2
    assert err == (
        "tessera: error: --model is in the place of the command: `tessera serve --model=x ...`, or `tessera --help`\n"
    )


@pytest.mark.parametrize(("word", "command"), [("SERVE", "serve"), ("Bench", "bench")])
def test_a_command_in_capitals_is_answered_with_its_name(tessera, word, command):
    assert f"it is `tessera {command}`" in tessera(word)[2]


def test_another_word_is_answered_with_the_most_similar_command(tessera):
    assert "did you mean doctor?" in tessera("docter")[2]
