"""Compiles for GPUs that are not there while other tests run, and has the tests of what came out wait for the end.

The compilers are of low priority: they take the processors that the other tests leave.
"""

from __future__ import annotations

import contextlib

import pytest

from tests.kernels.compile.cross_compile_pool import Pool
from tests.kernels.triton_interpreter import HAS_TRITON

_WORKERS = {
    "Job": (2, "tests.kernels.compile.cross_compile_worker"),
    "FusedJob": (1, "tests.kernels.compile.fused_compile_worker"),
}
"""Processes for a kind of job, and what they run."""
_stack = contextlib.ExitStack()
_answers = {}


def _job(item):
    job = getattr(getattr(item, "callspec", None), "params", {}).get("job")
    return job if type(job).__name__ in _WORKERS else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: _job(item) is not None)


def pytest_collection_finish(session):
    if session.config.option.collectonly or not HAS_TRITON:
        return
    pools = {}
    for job in filter(None, map(_job, session.items)):
        kind = type(job).__name__
        if kind not in pools:
            processes, module = _WORKERS[kind]
            pool = Pool(processes, session.config.cache.mkdir("triton"), module)
            pools[kind] = _stack.enter_context(pool)
        if job not in _answers:
            _answers[job] = pools[kind].submit(job)


def pytest_sessionfinish():
    _stack.close()


@pytest.fixture(scope="session")
def answers():
    """What compiling each selected job found, as futures."""
    return _answers
