"""`tessera warmup` starts the same engine as `tessera serve`, prints how long that took, and ends."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def warm_up(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "server.cli.main", "warmup", *arguments],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


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
