"""The hooks leave out what the manifest has, say so in one line, and enter what passes."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.kernels.compile.manifest import hooks
from tests.kernels.compile.manifest.selection import Compilation, read_manifest, write_manifest
from tests.kernels.triton_interpreter import HAS_TRITON

ROOT = Path(__file__).parents[4]
NAMES = [f"test_a[{i}]" for i in range(6)]
DIGESTS = {name: str(i) * 16 for i, name in enumerate(NAMES)}


def item_of(name, *, slow=True, compiles=True):
    return SimpleNamespace(
        nodeid=name,
        fixturenames=["compile_job"] if compiles else [],
        callspec=SimpleNamespace(params={"job": name}),
        get_closest_marker=lambda mark: mark if slow and mark == "slow" else None,
        user_properties=[],
    )


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    path = tmp_path / "compilations.txt"
    monkeypatch.setattr(hooks, "read_manifest", partial(read_manifest, path))
    monkeypatch.setattr(hooks, "write_manifest", partial(write_manifest, path=path))
    monkeypatch.setattr(hooks, "checked_out", lambda: "abcdef0123456789")
    monkeypatch.setattr(hooks, "HAS_TRITON", True)

    def identified(items):
        return {
            item.nodeid: Compilation(
                DIGESTS[item.nodeid], ("test_a", "kernel", 90), not hooks._is_slow(item)
            )
            for item in items
        }

    monkeypatch.setattr(hooks, "identified", identified)
    return path


@pytest.fixture
def run(manifest):
    """Collect and report as pytest does; returns the names that ran, and the summary."""

    def collect(items, *, args=("tests",), fails=(), **options):
        deselected, lines = [], []

        def deselect(items):
            deselected.extend(items)

        config = SimpleNamespace(
            getoption=lambda name: options.get(name, False),
            option=SimpleNamespace(keyword=""),
            args=list(args),
            hook=SimpleNamespace(pytest_deselected=deselect),
        )
        choice = hooks._Choice(config)
        every = list(items)
        steps = choice.pytest_collection_modifyitems(config, items)
        next(steps)
        with pytest.raises(StopIteration):
            steps.send(None)
        assert len(items) + len(deselected) == len(every)
        for item in items:
            choice.pytest_runtest_logreport(
                SimpleNamespace(
                    when="call",
                    passed=item.nodeid not in fails,
                    user_properties=item.user_properties,
                )
            )
        terminal = SimpleNamespace(write_line=lines.append)
        choice.pytest_terminal_summary(terminal, pytest.ExitCode.OK)
        return [item.nodeid for item in items], "\n".join(lines)

    return collect


def all_items():
    return [item_of(name) for name in NAMES]


def test_known_compilations_are_left_out_and_one_line_says_so(run, manifest):
    write_manifest([DIGESTS[name] for name in NAMES[:4]], manifest)

    names, said = run([*all_items(), item_of("test_b", compiles=False)])

    assert {NAMES[0], *NAMES[4:], "test_b"} <= set(names)
    left_out = len(NAMES) + 1 - len(names)
    assert 0 < left_out <= 3
    assert said.count("\n") == 0
    assert f"{left_out} of 6 slow ones left out, because compilations.txt says" in said
    assert f"1 representatives, {3 - left_out} chosen to check it (1 in 16, by abcdef01)" in said
    assert "and 2 that it lacks" in said


@pytest.mark.parametrize(
    "how", [{"all_cases": True}, {"args": ["tests/test_a.py::test_a"]}], ids=str
)
def test_all_run_when_they_are_asked_for(how, run, manifest):
    write_manifest(DIGESTS.values(), manifest)

    names, said = run(all_items(), **how)

    assert names == NAMES
    assert said == "compilations for absent GPUs: all 6 slow ones, known or not"


def test_a_run_without_slow_compilations_identifies_none_and_says_nothing(run, monkeypatch):
    monkeypatch.setattr(hooks, "identified", None)

    names, said = run([item_of(NAMES[0], slow=False), item_of("test_b", compiles=False)])

    assert names == [NAMES[0], "test_b"]
    assert said == ""


def test_recording_runs_what_is_missing_and_enters_what_passes(run, manifest):
    stale = "f" * 16
    write_manifest([DIGESTS[NAMES[0]], stale], manifest)
    items = [*all_items(), item_of("test_b", compiles=False)]

    names, said = run(items, record_compilations=True, fails=[NAMES[2]])

    assert names == NAMES[1:]
    passed = {DIGESTS[name] for name in NAMES} - {DIGESTS[NAMES[2]]}
    assert read_manifest(manifest) == passed
    assert said == "compilations.txt: 5 of 6 slow compilations; 4 are new"


def test_a_compilation_that_cannot_be_identified_runs_and_is_not_entered(
    run, monkeypatch, manifest
):
    monkeypatch.setitem(DIGESTS, NAMES[1], "")
    write_manifest([DIGESTS[name] for name in NAMES if name != NAMES[1]], manifest)

    names, _ = run(all_items(), record_compilations=True)

    assert names == [NAMES[1]]
    assert "" not in read_manifest(manifest)


def pytest_run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_recording_a_part_of_the_tests_is_refused():
    status, said = pytest_run(
        "--record-compilations", "tests/kernels/compile/test_blackwell_compile.py"
    )

    assert status == pytest.ExitCode.USAGE_ERROR
    assert "run `make compilations`" in said


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")
def test_several_processes_make_one_choice_and_the_controlling_one_says_it(tmp_path):
    (tmp_path / "knows_all.py").write_text(
        "from tests.kernels.compile.manifest import selection\nselection.chosen = lambda *_: {}\n"
    )
    status, said = pytest_run(
        "-n2", "-p", "knows_all", "-m", "slow", "tests/kernels/compile/test_blackwell_compile.py",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip

    assert status == pytest.ExitCode.OK, said
    ((left_out, total),) = re.findall(r"(\d+) of (\d+) slow ones left out", said)
    assert left_out == total != "0"
