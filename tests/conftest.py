"""What has to happen before any test module is imported."""

from __future__ import annotations

import torch

from tests.kernels import triton_interpreter

pytest_plugins = ["tests.gpu.hooks"]

# Test processes run side by side, and a second thread gains nothing at the sizes of tests.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    triton_interpreter.load()
