"""The GPU tests have run on code that is not much older, and what writes and judges their results."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from tests.gpu import result_file
from tests.gpu.result_file import ROOT, add, commits_since, count, digest, head

MOST_COMMITS = 40
"""Commits of the kernels and the model after which `make test-gpu` must run again."""
FOLDER = ROOT / "tests/gpu/results"
CODE = {"gpu": "NVIDIA H200", "commit": "a" * 40, "sources": "0", "versions": {}}


def newest():
    results = [json.loads(it.read_text()) for it in FOLDER.glob("*.json")]
    if not results:
        pytest.skip(
            f"{FOLDER} has no result yet: run `make test-gpu` on a GPU, and commit the file"
        )
    return max(results, key=lambda it: it["date"])


def test_the_gpu_tests_have_run_on_code_that_is_not_much_older(record_property):
    result = newest()
    if result["sources"] == digest(ROOT):
        return
    commits = commits_since(ROOT, result["commit"])
    if commits is None and result_file.git(ROOT, "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the checkout has no history, and the sources differ from those tested")

    assert commits is not None, (
        f"{result['commit']} is not in the history: run `make test-gpu` again"
    )
    record_property("newer_commits", commits)
    assert commits <= MOST_COMMITS, (
        f"{commits} commits of kernels and model are newer than the GPU tests of {result['date']}, and the limit is "
        f"{MOST_COMMITS}: run `make test-gpu` again"
    )


def test_no_gpu_test_failed():
    result = newest()

    assert result["passed"] > 0
    assert not {name: it["failed_tests"] for name, it in result["files"].items() if it["failed"]}


def test_runs_of_other_files_at_the_same_commit_are_one_result(tmp_path):
    add(tmp_path, CODE, {"b": count({"b::1": "passed", "b::2": "failed"})}, "1")
    path = add(tmp_path, CODE, {"a": count({"a::1": "skipped"})}, "2")
    result = json.loads(path.read_text())

    assert path.name == "nvidia-h200.json"
    assert result | CODE == result
    assert (result["date"], result["passed"], result["failed"], result["skipped"]) == ("2", 1, 1, 1)
    assert list(result["files"]) == ["a", "b"]
    assert result["files"]["b"]["failed_tests"] == ["2"]

    add(tmp_path, CODE, {"b": count({"b::1": "passed", "b::2": "passed"})}, "3")
    assert json.loads(path.read_text())["failed"] == 0


@pytest.mark.parametrize("name", ["commit", "sources", "versions"])
def test_a_run_of_other_code_replaces_the_result(tmp_path, name):
    add(tmp_path, CODE, {"b": count({"b::1": "passed"})}, "1")
    path = add(tmp_path, CODE | {name: "other"}, {"a": count({"a::1": "passed"})}, "2")

    assert list(json.loads(path.read_text())["files"]) == ["a"]


@pytest.fixture
def repository(tmp_path):
    """Return a function that commits a text of a file, and returns the commit."""
    for name in result_file.SOURCES:
        (tmp_path / name).mkdir()
    run(tmp_path, "init", "-q")

    def commit(path, text):
        (tmp_path / path).write_text(text)
        run(tmp_path, "add", "-A")
        run(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", text)
        return head(tmp_path)

    return commit


def run(folder, *words):
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


def test_only_commits_of_kernels_and_model_count(repository, tmp_path):
    first = repository("kernels/a.py", "1")
    repository("other", "2")
    assert commits_since(tmp_path, first) == 0

    repository("kernels/a.py", "3")
    repository("model/b.py", "4")
    assert commits_since(tmp_path, first) == 2


def test_a_commit_that_a_rebase_has_replaced_is_unknown_but_the_sources_are_the_same(
    repository, tmp_path
):
    repository("kernels/a.py", "1")
    old, sources = repository("kernels/a.py", "2"), digest(tmp_path)
    run(
        tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--amend", "-qm", "other"
    )

    assert commits_since(tmp_path, old) is None
    assert digest(tmp_path) == sources
    (tmp_path / "model/new.py").write_text("")
    assert digest(tmp_path) != sources


def test_changes_that_are_not_committed_have_no_commit(repository, tmp_path):
    repository("kernels/a.py", "1")
    (tmp_path / "kernels/a.py").write_text("2")

    with pytest.raises(ValueError, match="not committed"):
        head(tmp_path)
    with pytest.raises(ValueError, match="--gpu-commit"):
        head(tmp_path / "nowhere")


@pytest.fixture
def finished(monkeypatch, tmp_path):
    """Return a function that writes what reports of tests say; arguments of the run differ."""
    monkeypatch.setattr(result_file, "_outcomes", {})
    monkeypatch.setattr(result_file, "_gpus", set())
    monkeypatch.setattr(result_file, "head", lambda _: pytest.fail("--gpu-commit is given"))

    def finish(*reports, args=("tests/gpu",), status=0, **options):
        for nodeid, when, outcome in reports:
            properties = [["gpu", True]] + (
                [["gpu_name", "NVIDIA H200"]] if when != "setup" else []
            )
            result_file.pytest_runtest_logreport(
                SimpleNamespace(
                    nodeid=nodeid, when=when, outcome=outcome, user_properties=properties,
                    failed=outcome == "failed",
                )
            )  # fmt: skip
        given = {"--gpu-commit": "c" * 40} | options
        config = SimpleNamespace(
            args=args,
            option=SimpleNamespace(keyword=options.get("keyword", "")),
            getoption=lambda name, default=None: given.get(name, default),
        )
        return json.loads(result_file._write(tmp_path, config, status).read_text())

    return finish


PASSED = [("a.py::1", when, "passed") for when in ("setup", "call", "teardown")]


def test_a_test_fails_in_any_phase_and_is_skipped_in_the_first_or_second(finished):
    result = finished(
        *PASSED,
        ("a.py::2", "setup", "passed"), ("a.py::2", "call", "failed"), ("a.py::2", "teardown", "passed"),
        ("b.py::3", "setup", "passed"), ("b.py::3", "call", "passed"), ("b.py::3", "teardown", "failed"),
        ("b.py::4", "setup", "skipped"), ("b.py::4", "teardown", "passed"),
        ("b.py::5", "setup", "passed"), ("b.py::5", "call", "skipped"), ("b.py::5", "teardown", "passed"),
    )  # fmt: skip

    assert result["files"] == {
        "a.py": {"passed": 1, "failed": 1, "skipped": 0, "failed_tests": ["2"]},
        "b.py": {"passed": 0, "failed": 1, "skipped": 2, "failed_tests": ["3"]},
    }
    assert result["commit"] == "c" * 40


@pytest.mark.parametrize(
    "options",
    [
        {"args": ("tests/gpu/a.py::1",)}, {"keyword": "x"}, {"lf": True}, {"maxfail": 1}, {"status": 2},
    ],
)  # fmt: skip
def test_a_run_of_a_part_of_a_file_writes_nothing(finished, options):
    with pytest.raises(ValueError, match=r"parts of files|did not end"):
        finished(*PASSED, **options)


def test_a_run_without_a_gpu_writes_nothing(finished):
    with pytest.raises(ValueError, match="no GPU"):
        finished(("a.py::1", "setup", "skipped"))
