"""A run that selects GPU tests and skips all of them fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run_pytest(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests would run")
@pytest.mark.parametrize("processes", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_a_run_fails_with_a_reason_if_all_gpu_tests_were_skipped(processes):
    done = run_pytest("tests/gpu/test_attention_errors_gpu.py", "-m", "gpu", "-n", processes)

    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "gpu tests ran on no CUDA device" in done.stdout
    assert "FAILED: gpu tests were selected, but all of them were skipped" in done.stdout


@pytest.mark.slow
def test_gpu_tests_are_not_part_of_a_default_run():
    done = run_pytest("tests/gpu/test_attention_errors_gpu.py")

    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "gpu tests ran" not in done.stdout
