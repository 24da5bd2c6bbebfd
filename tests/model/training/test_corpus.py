"""Selection of the training text and of the held-out files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from model.training.corpus import (
    MAX_HEAD_LINES,
    build_corpus,
    fragments_of,
    read_library,
    repeated_share,
    shared_share,
)
from model.training.repetition import LONGEST_RUN


def _function(name: str, lines: int = 12) -> str:
    # Neighbouring lines have unlike forms, since runs of one form are shortened.
    body = "".join(
        f"    {name}_{i} = compute({i}, {name!r}){' + 1' * (i % 2)}\n" for i in range(lines)
    )
    return f"def {name}(a):\n{body}    return a\n"


def _library(root: Path, version: str, files: dict[str, str]) -> Path:
    folder = root / version
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def _texts(count: int) -> dict[str, str]:
    return {
        f"mod{i}.py": f'"""Module {i}."""\n\nimport os\n\n'
        + "".join(_function(f"f{i}_{j}") for j in range(4))
        for i in range(count)
    }


def test_a_held_out_file_is_absent_from_training_in_every_version(tmp_path):
    files = _texts(10)
    old = _library(tmp_path, "python3.11", files)
    new = _library(tmp_path, "python3.13", {k: v + _function("extra") for k, v in files.items()})
    corpus = build_corpus([old, new], 0.3, seed=0)
    held = {file.path for file in corpus.held_out}
    assert held
    assert held.isdisjoint(file.path for file in corpus.library)
    trained = "".join((*[f.text for f in corpus.library], *corpus.library_fragments))
    for path in held:
        assert f"def f{path[3]}_0" not in trained


def test_a_moved_copy_of_a_held_out_file_is_not_trained_on(tmp_path):
    files = _texts(10)
    old = _library(tmp_path, "python3.11", files)
    moved = _library(tmp_path, "python3.13", {f"pkg/{k}": v for k, v in files.items()})
    corpus = build_corpus([old, moved], 0.3, seed=0)
    assert corpus.dropped["repeats a held-out file"] == len(corpus.held_out)


def test_a_further_version_adds_only_new_fragments(tmp_path):
    files = _texts(10)
    old = _library(tmp_path, "python3.11", files)
    fresh = _function("entirely_new")
    new = _library(tmp_path, "python3.13", {k: v + fresh for k, v in files.items()})
    before, after = build_corpus([old], 0.3, seed=0), build_corpus([old, new], 0.3, seed=0)
    assert before.library == after.library
    assert set(after.library_fragments) - set(before.library_fragments) == {fresh}


def test_every_fragment_of_a_file_parses_and_is_dedented():
    text = Path(ast.__file__).read_text()
    fragments = list(fragments_of(text))
    assert len(fragments) > 50
    for fragment in fragments[:-1]:
        ast.parse(fragment)
        assert not fragment[0].isspace()
    assert fragments[-1].startswith(("import", "from"))


def test_tables_and_invalid_files_are_left_out_with_their_reason(tmp_path):
    folder = _library(
        tmp_path,
        "python3.11",
        {
            "good.py": _function("good"),
            "table.py": "TABLE = [\n" + "    (1, 2, 3),\n" * 50 + "]\n",
            "broken.py": "def broken(:\n",
            "empty.py": "",
            "site-packages/other.py": _function("other"),
        },
    )
    files, dropped = read_library(folder)
    assert [file.path for file in files] == ["good.py"]
    assert set(dropped) == {
        "a table of literals",
        "does not parse with the running interpreter",
        "empty",
    }


def test_a_share_out_of_range_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"held_out_share is 0\.9"):
        build_corpus([tmp_path], 0.9, seed=0)


def test_a_folder_without_python_files_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match="no usable"):
        read_library(tmp_path)


def test_a_long_class_is_cut_after_the_last_method_that_fits():
    methods = "".join(
        f"    def method{i}(self):\n" + f"        return self.value{i} + {i}\n" * 8 + "\n"
        for i in range(30)
    )
    short, long = "class Short:\n" + methods[:350], "class Long:\n" + methods
    fragments = list(fragments_of(short[: short.rindex("\n    def")] + "\n" + long))
    classes = [it for it in fragments if it.startswith("class")]
    assert [it.split(":")[0] for it in classes] == ["class Short", "class Long"]
    assert MAX_HEAD_LINES - 10 < classes[1].count("\n") <= MAX_HEAD_LINES
    for fragment in classes:
        ast.parse(fragment)
    whole = "class Whole:\n    def only(self):\n" + "        x = self.y\n" * 100
    assert whole in list(fragments_of(whole))


def test_a_copy_of_held_out_text_is_left_out_after_runs_were_shortened(tmp_path):
    run = "".join(f"    check({i})\n" for i in range(200))
    files = {f"mod{i}.py": f"def f{i}():\n{run}" + _function(f"g{i}", 40) for i in range(10)}
    old = _library(tmp_path, "python3.11", files)
    moved = _library(tmp_path, "python3.13", {f"pkg/{k}": v for k, v in files.items()})
    corpus = build_corpus([old, moved], 0.3, seed=0)
    held = [file.path.removesuffix(".py").removeprefix("mod") for file in corpus.held_out]
    trained = [*(file.text for file in corpus.library), *corpus.library_fragments]
    assert held
    assert all(text.count("check(") <= LONGEST_RUN for text in trained)
    assert not any(f"def g{number}(" in text for number in held for text in trained)


def test_repeated_text_is_measured_in_shingles():
    text, other = _function("f", 20), _function("other", 20)
    assert repeated_share([text, other]) == 0
    assert repeated_share([text, text]) == pytest.approx(0.5)
    assert shared_share([text], [other]) == 0
    assert shared_share([text], [other, text]) == 1
