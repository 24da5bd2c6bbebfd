"""`tessera warmup` starts the same engine as `tessera serve`, prints how long that took, and ends."""

import subprocess
import sys

import pytest

from tests.kernels.triton_interpreter import HAS_TRITON

pytestmark = pytest.mark.e2e
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")


def warm_up(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "server.cli.main", "warmup", *arguments],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_warmup_starts_an_engine_and_prints_how_long_each_phase_took():
    done = warm_up("--device=cpu", "--kv-cache-tokens=512")

    assert done.returncode == 0, done.stderr
    assert "ready after" in done.stdout
    assert "loading the weights" in done.stdout
    assert "finds its kernels" not in done.stdout  # a CPU has none to compile


def test_warmup_exits_with_status_1_and_the_reason_if_the_engine_cannot_start():
    done = warm_up("--device=cpu", "--max-model-len=1000000")

    assert done.returncode == 1
    assert "tessera warmup: error: --max-model-len 1000000 is more than" in done.stderr
    assert done.stdout == ""


def test_a_folder_for_kernels_needs_the_gpu_that_they_are_for():
    done = warm_up("--output=kernels")

    assert done.returncode == 2
    assert done.stderr == "tessera warmup: error: --output needs --arch\n"


def test_a_folder_for_kernels_without_a_name_is_refused():
    done = warm_up("--arch=h100", "--output=")

    assert done.returncode == 2
    assert done.stderr == "tessera warmup: error: --output '' names no folder\n"


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("folder", ["/dev/null", "/proc/self"])
def test_a_folder_where_kernels_cannot_be_written_is_refused_before_anything_is_compiled(folder):
    done = warm_up("--arch=h100", f"--output={folder}")

    assert done.returncode == 1
    assert done.stderr.startswith(
        f"tessera warmup: error: cannot write compiled kernels to {folder}: "
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@needs_triton
def test_the_folder_that_the_service_will_read_need_not_be_there_yet():
    done = warm_up("--arch=h100", "--compiled-kernels=/no/such", "--output=/dev/null")

    assert done.stderr.startswith("tessera warmup: error: cannot write compiled kernels")


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("arch", ["t4", "sm_75"])
def test_a_gpu_whose_kernels_cannot_be_compiled_without_it_is_refused(arch):
    done = warm_up(f"--arch={arch}")

    assert done.returncode == 1
    assert "tessera warmup: error: NVIDIA T4 (sm_75) runs torch_" in done.stderr
