"""An error of the device or the kernels' compiler at start-up says what to do about it."""

import subprocess

import pytest
import torch

from server.engine.runner.device_errors import explain

GCC = ["gcc", "/x/main.c", "-O3", "-shared", "-fPIC", "-o", "/x/cuda_utils.so"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
        ),
        FileNotFoundError(2, "No such file or directory", "no-such-cc"),
        subprocess.CalledProcessError(1, GCC),
    ],
    ids=["none", "wrong CC", "no headers"],
)
def test_a_missing_compiler_names_what_to_install(error):
    text = explain(error, "warming up")

    assert text.startswith("warming up failed: ")
    assert "apt-get install gcc libc6-dev python3-dev" in text


def test_a_lack_of_memory_names_the_settings_that_need_less():
    text = explain(torch.OutOfMemoryError("CUDA out of memory. Tried 1 GiB.\nrest"), "warming up")

    assert "CUDA out of memory. Tried 1 GiB.; " in text
    assert "--max-num-batched-tokens" in text
    assert "rest" not in text


def test_another_error_is_named_with_its_phase():
    error = torch.AcceleratorError("CUDA error: no kernel image is available\nmore")

    assert explain(error, "loading the weights") == (
        "loading the weights failed: AcceleratorError: CUDA error: no kernel image is available"
    )


def test_another_programs_failure_is_not_the_compilers():
    assert "gcc" not in explain(subprocess.CalledProcessError(1, ["ptxas"]), "warming up")
