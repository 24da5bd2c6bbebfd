"""The parser: suggestions, flags of true or false, optional positional arguments, and the layout of the help."""

import pytest

from server.cli.parsing.parser import BOOLEAN, Parser, did_you_mean


@pytest.fixture
def parser():
    parser = Parser(prog="tool")
    parser.add_argument("first", nargs="?")
    parser.add_argument("second", nargs="?")
    parser.add_argument("--port")
    parser.add_argument("--kind", choices=["red", "green"])
    parser.add_listed("--overlap", BOOLEAN, help="do " + "much " * 40 + "with --kv-cache-dtype")
    parser.add_listed("--dtype", ["a", "b"])
    return parser


def error(parser, capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        parser.parse_args(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--prot", "unknown flag --prot; did you mean --port?"),
        ("--prot=9", "unknown flag --prot; did you mean --port?"),
        ("--PORT", "did you mean --port?"),
        ("--no-overlpa", "did you mean --no-overlap?"),
        ("--zzzzzz", "unknown flag --zzzzzz; `tool --help` lists the flags"),
    ],
)
def test_an_unknown_flag_is_one_line_with_the_most_similar_flag(parser, capsys, flag, words):
    printed = error(parser, capsys, flag)

    assert printed.count("\n") == 1
    assert printed.startswith("tool: error: ")
    assert words in printed


@pytest.mark.parametrize(
    "flag", ["--tokenizer", "--ctx-size", "--tp", "--lora-modules", "-hf", "-np", "--no-jinja"]
)
def test_a_name_of_another_server_is_not_taken_for_a_misspelled_one(parser, capsys, flag):
    printed = error(parser, capsys, flag, "x")

    assert printed == f"tool: error: unknown flag {flag}; `tool --help` lists the flags\n"


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("--modle", ["--port", "--model"], "; did you mean --model?"),
        ("--max-model-length", ["--max-model-len"], "; did you mean --max-model-len?"),
        ("--quantisation", ["--quantization"], "; did you mean --quantization?"),
        ("--tokenizer", ["--block-size"], ""),
        ("--max-seq-len", ["--max-model-len"], ""),
        ("--tp", ["--dtype"], ""),
        ("sevre", ["serve", "size"], "; did you mean serve?"),
        ("x", [], ""),
    ],
)
def test_only_a_misspelled_word_leads_to_a_suggestion(word, known, hint):
    assert did_you_mean(word, known) == hint


def test_an_unknown_flag_is_reported_although_its_value_would_fit_elsewhere(parser, capsys):
    assert "unknown flag --prot" in error(parser, capsys, "--prot", "9000", "x", "y", "z")


def test_flags_cannot_be_abbreviated(parser, capsys):
    assert "did you mean --port" in error(parser, capsys, "--por", "1")


def test_a_choice_outside_the_list_is_refused_with_the_list(parser, capsys):
    assert "--kind: 'blue' is none of red, green" in error(parser, capsys, "--kind=blue")


def test_a_flag_that_the_caller_checks_takes_any_value(parser):
    assert parser.parse_args(["--dtype=c"]).dtype == "c"


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--overlap"], "true"),
        (["--no-overlap"], "false"),
        (["--overlap", "false"], "false"),
        (["--overlap=no"], "no"),
        (["--overlap", "--port=1"], "true"),
    ],
)
def test_a_flag_of_true_or_false_may_have_no_value(parser, arguments, value):
    assert parser.parse_args(arguments).overlap == value


def test_a_flag_without_its_value_leaves_the_following_positional_argument_alone(parser):
    parsed = parser.parse_args(["--overlap", "org/name"])

    assert (parsed.overlap, parsed.first) == ("true", "org/name")


@pytest.mark.parametrize(
    "arguments",
    [
        ["a", "b", "--port", "1"],
        ["--port", "1", "a", "b"],
        ["a", "--port", "1", "b"],
        ["--port=1", "a", "--kind", "red", "b"],
    ],
)
def test_optional_positional_arguments_may_stand_anywhere(parser, arguments):
    parsed = parser.parse_args(arguments)

    assert (parsed.first, parsed.second, parsed.port) == ("a", "b", "1")


def test_one_positional_argument_too_many_is_named(parser, capsys):
    assert "unexpected argument 'c'" in error(parser, capsys, "a", "b", "c")


def test_words_after_two_hyphens_are_no_flags(parser):
    assert parser.parse_args(["--port=1", "--", "--overlap"]).first == "--overlap"


def test_a_flag_of_this_command_is_never_called_unknown(parser, capsys):
    assert "--no-overlap takes no value" in error(parser, capsys, "--no-overlap=false")
    assert "but 'False' follows it" in error(parser, capsys, "--no-overlap", "False")
    assert "--port follows --" in error(parser, capsys, "a", "b", "--", "--port")


def test_a_number_in_the_word_of_a_short_flag_of_another_server_is_set_apart(parser, capsys):
    parser.takes_settings = True

    assert "the value of -ngl is a word of its own: -ngl 99" in error(parser, capsys, "-ngl99")


def test_a_hyphen_alone_is_a_positional_argument(parser):
    assert parser.parse_args(["a", "--port=1", "-"]).second == "-"


def test_a_number_after_a_flag_of_true_or_false_is_its_value(parser):
    assert parser.parse_args(["--overlap", "1,2"]).overlap == "1,2"


def test_a_flag_in_front_of_the_command_is_named(capsys):
    parser = Parser(prog="tool")
    parser.add_subparsers(dest="command", prog="tool").add_parser("serve")

    assert error(parser, capsys, "--model-id", "x") == (
        "tool: error: --model-id follows a command, as in `tool serve --model-id`; `tool --help` lists them\n"
    )
    assert (
        error(parser, capsys, "--hlep")
        == "tool: error: unknown flag --hlep; did you mean --help?\n"
    )


def test_an_unknown_command_is_one_line_with_the_most_similar_one(capsys):
    parser = Parser(prog="tool")
    commands = parser.add_subparsers(dest="command", prog="tool")
    commands.add_parser("serve")
    commands.add_parser("plan")

    assert error(parser, capsys, "sevre") == (
        "tool: error: unknown command 'sevre'; did you mean serve?\n"
    )
    assert "the commands are serve, plan" in error(parser, capsys, "xyz")


@pytest.mark.parametrize(("terminal", "widest"), [(60, 60), (90, 90), (300, 100)])
def test_the_help_fits_the_terminal_up_to_100_columns_and_breaks_no_flag(
    parser, monkeypatch, terminal, widest
):
    monkeypatch.setenv("COLUMNS", str(terminal))
    text = parser.format_help()

    assert max(map(len, text.splitlines())) <= widest
    assert "--kv-cache-dtype" in text
