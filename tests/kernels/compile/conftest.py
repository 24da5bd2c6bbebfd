"""Compilers for GPUs that are not there: one process of each kind, kept for all jobs of a test process."""

from __future__ import annotations

import contextlib

import pytest

from tests.kernels.compile.cross_compile_pool import Worker

_MODULES = {
    "Job": "tests.kernels.compile.cross_compile_worker",
    "FusedJob": "tests.kernels.compile.fused_compile_worker",
}
"""What compiles a kind of job."""


@pytest.fixture(scope="session")
def compile_job(request):
    """Compile a job and return its facts; what an earlier run compiled is read from pytest's cache."""
    cache = request.config.cache.mkdir("triton")
    with contextlib.ExitStack() as stack:
        workers = {kind: Worker(cache, module) for kind, module in _MODULES.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        yield lambda job: workers[type(job).__name__].answer(job)
