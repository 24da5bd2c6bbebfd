"""Writes the results of the GPU tests to a file, which `tests/meta/test_gpu_results.py` compares with the history.

`make test-gpu` gives `--gpu-results tests/gpu/results`. There is one file for each kind of GPU. A run of other test
files at the same commit is added to it, so that the suite may run in parts; but a file of tests runs as a whole: a run
with `-k`, `::` or `--lf`, or one that was interrupted, writes nothing and says so. Where the checkout has no git,
`--gpu-commit` names the commit.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import re
import subprocess
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = ("kernels", "model")
"""Folders whose changes need another run."""
_NAME = "gpu_name"
_PACKAGES = ("torch", "triton")
_outcomes: dict[str, dict[str, str]] = {}
_gpus: set[str] = set()


def pytest_addoption(parser):
    group = parser.getgroup("tessera")
    group.addoption("--gpu-results", metavar="FOLDER", help="write the results of GPU tests here")
    group.addoption(
        "--gpu-commit", metavar="HASH", help="commit of the tested code; default: HEAD of git"
    )


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item):
    # In the process of the test: with `-n` the controlling one uses no GPU.
    if item.get_closest_marker("gpu") and item.config.getoption("--gpu-results"):
        item.user_properties.append((_NAME, torch.cuda.get_device_name()))


def pytest_runtest_logreport(report):
    properties = dict(map(tuple, report.user_properties))
    if "gpu" not in properties:
        return
    if _NAME in properties:
        _gpus.add(properties[_NAME])
    tests = _outcomes.setdefault(report.nodeid.partition("::")[0], {})
    if report.failed or report.nodeid not in tests or tests[report.nodeid] == "passed":
        tests[report.nodeid] = report.outcome


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    folder = config.getoption("--gpu-results")
    if folder is None or hasattr(config, "workerinput"):
        return
    try:
        path = _write(Path(folder), config, exitstatus)
    except ValueError as error:
        terminalreporter.write_line(f"GPU results are not written: {error}", yellow=True)
    else:
        terminalreporter.write_line(f"GPU results: {path}")


def _write(folder, config, exitstatus):
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise ValueError("the run did not end")
    if any("::" in it for it in config.args) or config.option.keyword or _is_partial(config):
        raise ValueError("only parts of files were run (::, -k, --lf, -x)")
    if len(_gpus) != 1:
        raise ValueError(f"the tests ran on {', '.join(sorted(_gpus)) or 'no GPU'}")
    (gpu,) = _gpus
    result = {
        "gpu": gpu,
        "commit": config.getoption("--gpu-commit") or head(ROOT),
        "sources": digest(ROOT),
        "versions": {"python": platform.python_version()} | dict(map(_version, _PACKAGES)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    return add(folder, result, {name: count(tests) for name, tests in _outcomes.items()}, now())


def _is_partial(config):
    return any(config.getoption(name, None) for name in ("lf", "maxfail", "deselect"))


def count(tests):
    """Return how many tests of a file passed, failed and were skipped, and the names of those that failed."""
    outcomes = Counter(tests.values())
    counts = {name: outcomes[name] for name in ("passed", "failed", "skipped")}
    failed = sorted(name.partition("::")[2] for name, it in tests.items() if it == "failed")
    return counts | ({"failed_tests": failed} if failed else {})


def add(folder, result, files, date):
    """Write a result, with the files of earlier runs of the same code on the same kind of GPU.

    Args:
        folder: of the results.
        result: what both runs must have in common to be one.
        files: counts of the run by file.
        date: of the run, in ISO 8601.

    Returns:
        The path of the file.
    """
    path = folder / (re.sub(r"[^a-z0-9]+", "-", result["gpu"].lower()).strip("-") + ".json")
    before = json.loads(path.read_text()) if path.exists() else {}
    same = all(before.get(name) == value for name, value in result.items())
    files = dict(sorted(((before["files"] if same else {}) | files).items()))
    total = {
        name: sum(it[name] for it in files.values()) for name in ("passed", "failed", "skipped")
    }
    path.write_text(json.dumps(result | {"date": date} | total | {"files": files}, indent=1) + "\n")
    return path


def head(root):
    """Return the commit that is checked out.

    Raises:
        ValueError: the folder has no git, or files of `SOURCES` differ from the commit.
    """
    status = git(root, "status", "--porcelain", "--", *SOURCES)
    if status is None:
        raise ValueError("there is no git; --gpu-commit names the commit")
    if status:
        raise ValueError(f"{' and '.join(SOURCES)} have changes that are not committed")
    return git(root, "rev-parse", "HEAD")


def digest(root):
    """Return a digest of the sources, which stays the same if commits get other hashes."""
    hashed = hashlib.sha256()
    paths = (
        it
        for name in SOURCES
        for ending in ("*.py", "*.c", "*.h")
        for it in (root / name).rglob(ending)
    )
    for path in sorted(paths):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        hashed.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return hashed.hexdigest()


def commits_since(root, commit):
    """Return the number of commits of `SOURCES` after a commit; None if the history does not have it."""
    if git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    return int(git(root, "rev-list", "--count", "--no-merges", f"{commit}..HEAD", "--", *SOURCES))


def git(root, *words):
    """Return the output of git; None if it fails."""
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def now():
    """Return the time in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version(package):
    try:
        return package, version(package)
    except PackageNotFoundError:
        return package, "none"
