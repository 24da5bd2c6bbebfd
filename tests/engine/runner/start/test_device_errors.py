"""Start-up errors of the device or the kernel compiler are explained with a remedy."""

import subprocess

import pytest
import torch

from server.engine.runner.start.device_errors import explain

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
def test_the_error_for_a_missing_compiler_says_what_to_install(error):
    text = explain(error, "warming up")

    assert text.startswith("warming up failed: ")
    assert "apt-get install gcc libc6-dev python3-dev" in text


def test_the_error_for_too_little_memory_names_the_settings_to_reduce():
    text = explain(torch.OutOfMemoryError("CUDA out of memory. Tried 1 GiB.\nrest"), "warming up")

    assert "CUDA out of memory. Tried 1 GiB.; " in text
    assert "--max-num-batched-tokens" in text
    assert "rest" not in text


def test_other_errors_are_described_with_their_phase():
    error = torch.AcceleratorError("CUDA error: no kernel image is available\nmore")

    assert explain(error, "loading the weights") == (
        "loading the weights failed: AcceleratorError: CUDA error: no kernel image is available"
    )


def test_the_failure_of_another_program_is_not_blamed_on_the_compiler():
    assert "gcc" not in explain(subprocess.CalledProcessError(1, ["ptxas"]), "warming up")
