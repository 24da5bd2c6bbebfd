"""A start on a GPU finds every kernel that was compiled without one."""

import os
import subprocess
import sys

import pytest

from kernels import detect

pytestmark = pytest.mark.gpu


@pytest.mark.gpu_memory(12)
def test_a_start_compiles_nothing_that_was_compiled_without_the_gpu(tmp_path):
    def warm_up(*flags, **variables):
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")} | variables
        command = [sys.executable, "-m", "server.cli.main", "warmup", *flags]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=True
        ).stdout

    arch, shipped = detect().key, tmp_path / "shipped"
    warm_up(f"--arch={arch}", f"--output={shipped}", CUDA_VISIBLE_DEVICES="")
    assert len(list(shipped.glob("*/*.cubin"))) > 20

    warm_up("--device=cuda", f"--compiled-kernels={shipped}", "--kv-cache-gib=1")

    assert not list((tmp_path / "cache").glob("*/*.cubin"))
    assert not list((tmp_path / "cache").glob("*/__triton_launcher*"))
