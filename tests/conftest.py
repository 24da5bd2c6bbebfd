"""Hooks of all tests, and what must run before any test module is imported."""

from __future__ import annotations

import gc

import torch

from tests.kernels import triton_interpreter

pytest_plugins = ["tests.gpu.hooks"]

# Test processes run side by side, and a second thread gains nothing at the sizes of tests.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    triton_interpreter.load()


def pytest_collection_finish():
    """Keep modules and tests out of garbage collections, which would take a twentieth of the time."""
    gc.collect()
    gc.freeze()
