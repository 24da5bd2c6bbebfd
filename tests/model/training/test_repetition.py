"""Runs of lines of one form are shortened before training."""

from __future__ import annotations

import ast

from model.training.repetition import LONGEST_RUN, repeated_lines, without_runs


def _calls(count: int, indent: str = "    ") -> str:
    return "".join(f"{indent}self.assertEqual(f({i}), 'value {i}')\n" for i in range(count))


def test_the_first_lines_of_a_run_are_kept():
    text = "def test_f(self):\n    x = 1\n" + _calls(30) + "    return x\n"
    expected = "def test_f(self):\n    x = 1\n" + _calls(LONGEST_RUN) + "    return x\n"
    assert without_runs(text) == expected
    assert without_runs(expected) == expected


def test_lines_of_another_form_or_indentation_end_a_run():
    text = "def f(self):\n" + _calls(LONGEST_RUN) + "\n" + _calls(LONGEST_RUN)
    assert without_runs(text) == text
    text = "if a:\n" + _calls(LONGEST_RUN) + _calls(LONGEST_RUN, "")
    assert without_runs(text) == text


def test_imports_are_kept():
    text = "".join(f"import module{i}\n" for i in range(20))
    assert without_runs(text) == text


def test_a_file_that_would_not_parse_without_the_lines_is_kept():
    text = "def f(a):\n" + "".join(f"    if a == {i}:\n" + "    " * 2 + "pass\n" for i in range(3))
    nested = (
        "".join("    " * depth + f"if a{depth}:\n" for depth in range(9)) + "    " * 9 + "pass\n"
    )
    assert without_runs(text + nested) == text + nested
    text = "x = (" + "(\n" * 9 + "1" + ")\n" * 10
    assert without_runs(text) == text


def test_a_table_loses_its_later_rows_and_still_parses():
    text = "TABLE = [\n" + "".join(f"    ({i}, 'name{i}'),\n" for i in range(50)) + "]\n"
    shorter = without_runs(text)
    assert len(ast.literal_eval(shorter.partition("= ")[2])) == LONGEST_RUN
    assert sum(repeated_lines(text.splitlines())) == 50 - LONGEST_RUN
