"""The report of a run of mutants."""

import json
import tomllib

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants.__main__ import Change, Mutant, reason, run_mutants, score, table


def mutant(number, code, file="a.py"):
    return Mutant(f"a.f__mutmut_{number}", file, code)


def test_mutants_that_were_run_are_selected_by_the_last_digit_and_by_folder(tmp_path):
    for file, codes in (
        ("server/a.py", {"x_2": 0, "x_12": 1, "x_3": 1, "x_22": None, "x_32": 255}),
        ("b.py", {"y_5": 33}),
    ):
        meta = tmp_path / f"{file}.meta"
        meta.parent.mkdir(exist_ok=True)
        meta.write_text(json.dumps({"exit_code_by_key": codes}))

    assert list(run_mutants(tmp_path, "25")) == [
        ("y_5", "b.py", 33), ("x_2", "server/a.py", 0), ("x_12", "server/a.py", 1),
    ]  # fmt: skip
    assert [found.name for found in run_mutants(tmp_path, "3", "server")] == ["x_3"]


def test_the_score_leaves_out_equivalent_mutants_and_counts_crashes_and_limits_as_noticed():
    same = mutant(1, 0)
    found = [same, mutant(2, 0), mutant(3, 33), mutant(4, 1), mutant(5, -11), mutant(6, 36)]

    assert score(found, {same}) == 60.0
    assert score(found, ()) == 50.0
    assert score([], ()) == 0.0
    last = table(found, {same}).splitlines()[-1].split()
    assert last == ["all", "3", "2", "1", "1", "1", "60.0%"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Change("a.py", "x = 1", "x = None"), "first"),
        (Change("b.py", "x = 1", "x = None"), None),
        (Change("a.py", "y = 1", "x = None"), None),
        (Change("b.py", "zip(a, strict=True)", "zip(a, strict=None)"), "second"),
    ],
)
def test_an_equivalent_change_is_known_by_its_file_and_lines(change, why):
    known = [
        {"file": "a.py", "removed": "x = 1", "added": "x = None", "why": "first"},
        {"added": "strict=None", "why": "second"},
    ]

    assert reason(known, change) == why


def test_every_known_equivalent_names_a_file_and_a_line_that_exist():
    for entry in json.loads(mutants.EQUIVALENT.read_text()):
        assert entry["why"]
        if "removed" in entry:
            lines = (mutants.ROOT / entry["file"]).read_text().splitlines()
            text = " ".join(" ".join(line.strip() for line in lines).split())
            assert " ".join(entry["removed"].split()) in text, entry


def test_the_selection_has_files_and_tests_that_exist():
    files = mutants.mutated_files(mutants.ROOT)
    settings = tomllib.loads((mutants.ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]

    assert "server/engine/core/schedule/scheduler.py" in files
    for pattern in settings["only_mutate"]:
        assert list(mutants.ROOT.glob(pattern)), pattern
    for path in settings["pytest_add_cli_args_test_selection"] + settings["also_copy"]:
        assert (mutants.ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--digits", "2x"], "--digits: '2x' must be digits"),
        (["--digits", ""], "--digits: '' must be digits"),
        (["--jobs", "0"], "--jobs is 0; at least 1 is needed"),
        (["--only", "server/cli"], "--only: 'server/cli' has no file of model/sampling/device.py"),
    ],
)
def test_a_selection_of_nothing_is_a_mistake(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        mutants.main([*arguments, "--report"])

    assert caught.value.code == 2
    assert message in capsys.readouterr().err
