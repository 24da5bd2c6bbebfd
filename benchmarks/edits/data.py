"""Edits of Python files as prompts: 100 of them, in `edits.jsonl`.

Each is a part of a file that the bundled model was not trained on, an instruction and the part with the edit made: a
function renamed, a docstring added or an argument inserted. The files are those of CPython's standard library that
`model/bundled/evaluation.json` lists as held out; their text is under the Python Software Foundation License Version 2,
Copyright (c) 2001 Python Software Foundation; All Rights Reserved.

    python -m benchmarks.edits.data [--stdlib .../lib/python3.11] [--check]

writes the file again, with CPython 3.11.7 bit by bit; `--check` compares only.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import json
import random
import sys
import sysconfig
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from model.hub.resolve import BUNDLED, resolve
from model.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILE: Final = Path(__file__).parent / "edits.jsonl"
COUNT: Final = 100
SEED: Final = 43
_TOKENS: Final = range(300, 880)
"""Of a part, by the bundled tokenizer: prompt and answer have the part twice and fit into 2,048 tokens."""
_CHARACTERS: Final = range(600, 6000)
"""Of parts that may have so many tokens."""
_MOST_OF_A_FILE: Final = 3
_EARLY: Final = 0.4
"""The first change is in this share of a part's lines, so that most of the answer comes after it."""
_ARGUMENTS: Final = (
    "timeout=None", "verbose=False", "strict=True", "encoding='utf-8'", "limit=100", "default=None", "retries=3",
)  # fmt: skip
_VERBS: Final = ("compute", "handle", "collect", "prepare", "resolve", "update")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Edit(msgspec.Struct, frozen=True):
    """One edit.

    Attributes:
        path: of the file in the standard library.
        kind: "rename", "docstring" or "argument".
        instruction: what to do, in the imperative, without a full stop.
        text: the part of the file.
        changes: (first line, number of lines that go, lines that come) from the top of `text`, lines from 0 and with
            their ends.
    """

    path: str
    kind: str
    instruction: str
    text: str
    changes: tuple[tuple[int, int, tuple[str, ...]], ...]

    @property
    def edited(self) -> str:
        """The part with the edit made."""
        lines = self.text.splitlines(keepends=True)
        for first, count, new in reversed(self.changes):
            lines[first : first + count] = new
        return "".join(lines)


def read_edits(file: Path = FILE) -> list[Edit]:
    """Read the edits, of each kind a third, in random order."""
    return [msgspec.json.decode(line, type=Edit) for line in file.read_bytes().splitlines()]


def write_edits(edits: list[Edit], file: Path) -> None:
    """Write edits, one a line."""
    file.write_text("".join(json.dumps(msgspec.to_builtins(it)) + "\n" for it in edits))


def changes_between(text: str, edited: str) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """Return the `Edit.changes` from one text to another."""
    old, new = text.splitlines(keepends=True), edited.splitlines(keepends=True)
    codes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return tuple(
        (first, last - first, tuple(new[i:j])) for tag, first, last, i, j in codes if tag != "equal"
    )


def parts(text: str) -> Iterator[str]:
    """Yield runs of whole statements of a file, and classes with a run of their statements; each parses.

    Args:
        text: of the file.
    """
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    groups = [(0, tree.body)]
    classes = [it for it in tree.body if isinstance(it, ast.ClassDef)]
    groups += [(it.lineno, it.body) for it in classes if lines[it.lineno - 1].endswith(":\n")]
    for head, body in groups:
        first_lines = [_first_line(it) for it in body]
        for i, first in enumerate(first_lines):
            if not isinstance(body[i], _Function | ast.ClassDef):
                continue
            for last in body[i:]:
                end = last.end_lineno or last.lineno
                yield "".join(lines[head - 1 : head] if head else ()) + "".join(lines[first:end])


def rename(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (instruction, edited text) of functions with another name, wherever the name stands."""
    for function in _functions(text):
        old = function.name
        if old.startswith("__"):
            continue
        words = old.strip("_").lower().split("_")
        new = "_".join([rng.choice(_VERBS), *(words[1:] or words)])
        names = [
            it for it in tokenize.generate_tokens(io.StringIO(text).readline) if it.string == old
        ]
        if len(names) < 2 or new in text or not new.isidentifier():
            continue
        lines = text.splitlines(keepends=True)
        for name in reversed(names):
            row, column = name.start
            line = lines[row - 1]
            lines[row - 1] = line[:column] + new + line[column + len(old) :]
        yield f"rename the function {old} to {new}", "".join(lines)


def add_docstring(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (instruction, edited text) of functions with a docstring that they did not have."""
    lines = text.splitlines(keepends=True)
    for function in _functions(text):
        first = function.body[0]
        words = function.name.strip("_").split("_")
        at = _first_line(first)
        if ast.get_docstring(function) is not None or at <= function.lineno - 1 or not all(words):
            continue
        ending = rng.choice(("as the caller expects", "and change nothing else", "for this module"))
        docstring = f'"""{" ".join(words).capitalize()}, {ending}."""'
        line = " " * first.col_offset + docstring + "\n"
        yield (
            f"add the docstring {docstring} to the function {function.name}",
            "".join([*lines[:at], line, *lines[at:]]),
        )


def insert_argument(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (instruction, edited text) of functions with one more argument, the last."""
    for function in _functions(text):
        arguments = function.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs:
            continue
        lines = text.splitlines(keepends=True)
        line = lines[function.lineno - 1]
        head, closing, rest = line.rpartition("):")
        new = rng.choice(_ARGUMENTS)
        if not closing or rest.strip() or head.endswith(",") or new.split("=")[0] in text:
            continue
        comma = "" if head.endswith("(") else ", "
        lines[function.lineno - 1] = f"{head}{comma}{new}{closing}{rest}"
        yield (
            f"insert the argument {new} at the end of the arguments of the function {function.name}",
            "".join(lines),
        )


KINDS: Final[dict[str, Callable[[str, random.Random], Iterator[tuple[str, str]]]]] = {
    "rename": rename,
    "docstring": add_docstring,
    "argument": insert_argument,
}
"""What makes the edits of a kind."""


def make_edits(folder: Path, paths: list[str], count: int, seed: int) -> list[Edit]:
    """Choose parts of files and edit them.

    Args:
        folder: of the standard library.
        paths: of the files in it.
        count: edits.
        seed: chooses the parts and the edits.

    Raises:
        ValueError: the files do not have as many suitable parts.
    """
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_folder(resolve(BUNDLED))
    texts = {path: (folder / path).read_text(encoding="utf-8") for path in sorted(paths)}
    suitable = {
        path: [
            part
            for part in parts(text)
            if len(part) in _CHARACTERS and len(tokenizer.encode(part)) in _TOKENS
        ]
        for path, text in texts.items()
        if text.isascii()
    }
    kinds, made = list(KINDS), list[Edit]()
    for _ in range(_MOST_OF_A_FILE):
        for path in rng.sample(sorted(suitable), len(suitable)):
            kind = kinds[len(made) % len(kinds)]
            taken = {it.text for it in made}
            choices = [it for it in suitable[path] if not _overlaps(it, taken)]
            rng.shuffle(choices)
            edit = next((it for part in choices if (it := _edit(path, part, kind, rng))), None)
            if edit is not None:
                made.append(edit)
            if len(made) == count:
                return made
    raise ValueError(f"{len(made)} edits, not {count}: the files have no more suitable parts")


def _edit(path: str, part: str, kind: str, rng: random.Random) -> Edit | None:
    """Return an edit of a part whose first change is early; None if there is none."""
    found = []
    for instruction, edited in KINDS[kind](part, rng):
        changes = changes_between(part, edited)
        if changes[0][0] <= _EARLY * part.count("\n"):
            ast.parse(edited)
            found.append(Edit(path, kind, instruction, part, changes))
    return rng.choice(found) if found else None


def _overlaps(part: str, taken: set[str]) -> bool:
    return any(part in it or it in part for it in taken)


def _functions(text: str) -> list[_Function]:
    return [it for it in ast.walk(ast.parse(text)) if isinstance(it, _Function)]


def _first_line(statement: ast.stmt) -> int:
    """Return the index of a statement's first line, with its decorators."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(it.lineno for it in decorators)]) - 1


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description="Makes the edits again.")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    options = parser.parse_args()
    evaluation = json.loads((resolve(BUNDLED) / "evaluation.json").read_text())
    edits = make_edits(options.stdlib, evaluation["data"]["held_out"]["paths"], COUNT, SEED)
    if options.check:
        sys.exit(0 if edits == read_edits(options.output) else f"{options.output} differs")
    write_edits(edits, options.output)
    print(options.output, f"{options.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
