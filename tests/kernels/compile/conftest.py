"""Fixtures that compile for absent GPUs: one process for each kind of job, kept for all tests of a session."""

from __future__ import annotations

import contextlib

import pytest

from tests.kernels.compile.cross_compile_pool import MODULES, Worker


@pytest.fixture(scope="session")
def compile_job(request):
    """Compile a job and return its facts; results of earlier runs are read from pytest's cache."""
    cache = request.config.cache.mkdir("triton")
    with contextlib.ExitStack() as stack:
        workers = {kind: Worker(cache, module) for kind, module in MODULES.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        yield lambda job: workers[type(job).__name__].answer(job)
