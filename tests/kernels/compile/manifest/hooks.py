"""pytest hooks that leave out compilations for absent GPUs that the manifest says have succeeded, and say so.

`--all-cases` leaves out none, and neither does a run that names tests. `--record-compilations` runs those that
are missing from the manifest, and enters those that pass. With several processes (`-n`) the controlling process
collects no tests: it hears of the choice from the others at their end, and of passed tests by their reports.
"""

from __future__ import annotations

import collections
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.commit_share import checked_out, takes_all
from tests.kernels.compile.cross_compile_pool import MODULES, Worker
from tests.kernels.compile.manifest.selection import (
    DIGITS,
    MANIFEST,
    ONE_IN,
    Compilation,
    chosen,
    read_manifest,
    write_manifest,
)
from tests.kernels.compile.manifest.source_key import checks_key, digest_of
from tests.kernels.triton_interpreter import HAS_TRITON

FOLDER = Path(__file__).parents[1]
_PROPERTY = "compilation"
_CHOICE = "compilations"
"""Key of a process's output, for the controlling process."""


def pytest_addoption(parser):
    group = parser.getgroup("compilations for absent GPUs")
    group.addoption(
        "--record-compilations",
        action="store_true",
        help=f"only slow ones that are missing from {MANIFEST.name}; enter those that pass",
    )


def pytest_configure(config):
    is_whole = [Path(it).resolve() for it in config.args] == [FOLDER] and not config.option.keyword
    is_controller = not hasattr(config, "workerinput")
    if config.getoption("record_compilations") and is_controller and not is_whole:
        raise pytest.UsageError(
            "--record-compilations needs all tests of tests/kernels/compile and no others: "
            "run `make compilations`"
        )
    config.pluginmanager.register(_Choice(config), "compilations")


class _Choice:
    """The choice of a run, made where tests are collected and printed where results are."""

    def __init__(self, config):
        self._config = config
        self._records = config.getoption("record_compilations")
        self._is_worker = hasattr(config, "workerinput")
        self._found = {}
        self._passed = set()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        every = [item for item in items if _compiles(item)]
        result = yield
        concerned = [item for item in items if _compiles(item) and _is_slow(item)]
        if not HAS_TRITON:  # each of them is skipped
            return result
        if self._records or (concerned and not takes_all(config)):
            self._choose(every, items)
        elif concerned:
            self._found = {"all": len(concerned)}
        return result

    def _choose(self, every, items):
        """Deselect the slow compilations of `items` that this run leaves out."""
        known, commit = read_manifest(), checked_out()
        compilations = self._once(every)
        choice = chosen(compilations, known, commit)
        left, out, counts = [], [], collections.Counter()
        for item in items:
            it = compilations.get(item.nodeid)
            if it is None or it.always:
                (out if self._records else left).append(item)
                continue
            why = choice.get(item.nodeid, "left out")
            counts[why] += 1
            is_left = why == "missing" if self._records else why != "left out"
            (left if is_left else out).append(item)
            if it.digest:
                item.user_properties.append((_PROPERTY, it.digest))
        items[:] = left
        self._config.hook.pytest_deselected(items=out)
        self._found = {**counts, "commit": commit}
        if self._records:
            current = {it.digest for it in compilations.values() if not it.always}
            self._found["current"] = sorted(current)

    def _once(self, every):
        """Identify all compilations, in one process of a run; the others wait for it and read the result."""
        if not self._is_worker:
            return identified(every)
        import fcntl  # not on Windows, for which there is no Triton either

        run = self._config.workerinput["testrunuid"]
        path = self._config.cache.mkdir("triton") / "identified.json"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = json.loads(path.read_text()) if path.exists() else {}
            if content.get("run") != run:
                found = identified(every)
                fields = {name: [it.digest, it.group, it.always] for name, it in found.items()}
                path.write_text(json.dumps({"run": run, "compilations": fields}))
                return found
        return {
            name: Compilation(digest, tuple(group), always)
            for name, (digest, group, always) in content["compilations"].items()
        }

    def pytest_runtest_logreport(self, report):
        if not self._records or self._is_worker or report.when != "call" or not report.passed:
            return
        self._passed |= {it for name, it in report.user_properties if name == _PROPERTY}
        # At once, so that an interrupted run can be continued.
        write_manifest(read_manifest() | self._passed)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self._found = self._found or getattr(node, "workeroutput", {}).get(_CHOICE, {})

    def pytest_sessionfinish(self, session, exitstatus):
        if self._is_worker:
            session.config.workeroutput[_CHOICE] = self._found
        elif self._found and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # nothing is left to compile

    def pytest_terminal_summary(self, terminalreporter, exitstatus):
        if not self._found:
            return
        if self._records and exitstatus != pytest.ExitCode.INTERRUPTED:
            write_manifest(read_manifest() & set(self._found["current"]))
        terminalreporter.write_line(self._summary())

    def _summary(self):
        found = collections.Counter({k: n for k, n in self._found.items() if isinstance(n, int)})
        if "all" in found:
            return f"compilations for absent GPUs: all {found['all']} slow ones, known or not"
        total = sum(found.values())
        if self._records:
            return (
                f"{MANIFEST.name}: {len(read_manifest())} of {total} slow compilations; "
                f"{len(self._passed)} are new"
            )
        commit = self._found["commit"][:8] or "no commit"
        return (
            f"compilations for absent GPUs: {found['left out']} of {total} slow ones left out, "
            f"because {MANIFEST.name} says that they have succeeded; the others are "
            f"{found['representative']} representatives, {found['sample']} chosen to check it "
            f"(1 in {ONE_IN}, by {commit}) and {found['missing']} that it lacks"
        )


def identified(items):
    """Return what each test compiles, by its name.

    Raises:
        pytest.UsageError: a process that identifies compilations ended.
    """
    by_kind = collections.defaultdict(list)
    for item in items:
        by_kind[type(item.callspec.params["job"]).__name__].append(item)
    with ThreadPoolExecutor() as threads:
        parts = list(threads.map(_identified, by_kind.items()))
    found = {name: it for part in parts for name, it in part.items()}
    return {item.nodeid: found[item.nodeid] for item in items}


def _identified(kind_and_items):
    kind, items = kind_and_items
    worker, found, checks = Worker(None, MODULES[kind], "--keys"), {}, {}
    for item in items:
        job, test = item.callspec.params["job"], (item.path, item.originalname)
        if test not in checks:
            checks[test] = checks_key(*test)
        answer = worker.answer(job)
        if "ended" in answer:
            raise pytest.UsageError(f"{job} cannot be identified: {answer['error']}")
        # Without a key, no manifest has the compilation: its test runs, and reports the error.
        digest = digest_of(answer["key"], checks[test])[:DIGITS] if "key" in answer else ""
        group = (item.originalname, answer.get("kernel", ""), job.sm)
        found[item.nodeid] = Compilation(digest, group, not _is_slow(item))
    worker.close()
    return found


def _compiles(item):
    return "compile_job" in getattr(item, "fixturenames", ()) and "job" in getattr(
        getattr(item, "callspec", None), "params", ()
    )


def _is_slow(item):
    return item.get_closest_marker("slow") is not None
