"""What has to happen before any test module is imported."""

from __future__ import annotations

import torch

from tests.kernels import triton_interpreter

if not torch.cuda.is_available():
    triton_interpreter.load()
