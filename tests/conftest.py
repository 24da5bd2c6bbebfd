"""Hooks of all tests, and setup that must run before any test module is imported."""

from __future__ import annotations

import gc
import logging
import random
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.kernels import triton_interpreter

pytest_plugins = [
    "tests.gpu.hooks",
    "tests.gpu.result_file",
    "tests.kernels.compile.manifest.hooks",
    "tests.kernels.cpu.hooks",
    "tests.sampled",
]

# No wall clock in a verdict: a busy machine makes every example slow.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A run in the background of a shell ignores these signals, and so would the processes that tests start.
_HANDLERS = {
    "SIGINT": signal.default_int_handler,
    "SIGQUIT": signal.SIG_DFL,
    "SIGHUP": signal.SIG_DFL,
}
for _name, _handler in _HANDLERS.items():
    _number = getattr(signal, _name, None)  # Windows lacks two
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Test processes run in parallel, and a second thread does not make computations of this size faster.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    triton_interpreter.load()


def pytest_collection_finish():
    """Exclude modules and tests from garbage collection, which would take 5 % of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Start every test, and the fixtures that it is the first to need, from the same random numbers."""
    random.seed(0)
    torch.default_generator.manual_seed(
        0
    )  # torch.manual_seed records a traceback each time, for CUDA


@pytest.fixture(autouse=True)
def logging_restored():
    """Undo what a command does to logging: its handler writes to the standard error of the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
