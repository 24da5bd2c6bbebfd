"""PyTorch without what only its compiler uses."""

import subprocess
import sys

from server.engine.link.engine_process.torch_import import META_REGISTRATIONS, compiler_left_out

PROGRAM = """
import importlib, sys
from server.engine.link.engine_process.torch_import import META_REGISTRATIONS, compiler_left_out
with compiler_left_out():
    import torch
print(META_REGISTRATIONS in sys.modules, "torch._decomp" in sys.modules, "torch._refs" in sys.modules)
print(float(torch.nn.functional.silu(torch.ones(2, 3) @ torch.ones(3, 2)).sum()) > 0)
registrations = importlib.import_module(META_REGISTRATIONS)
print(registrations is torch._meta_registrations, len(vars(registrations)) > 100)
with torch.device("meta"):
    print(tuple(torch.nn.functional.scaled_dot_product_attention(*(torch.empty(1, 2, 3, 8),) * 3).shape))
"""


def test_the_compiler_is_left_out_and_can_be_imported_later():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True
    )

    assert run.stdout.splitlines() == ["False False False", "True", "True True", "(1, 2, 3, 8)"]


def test_an_imported_pytorch_is_left_as_it_is():
    __import__("torch")
    before = sys.modules.get(META_REGISTRATIONS)

    with compiler_left_out():
        assert sys.modules.get(META_REGISTRATIONS) is before

    assert sys.modules.get(META_REGISTRATIONS) is before
