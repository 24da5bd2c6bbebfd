"""Profiles of the engine on a GPU contain the kernels of eager and recorded steps with consistent times."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", ["false", "true"])
def test_a_profile_reports_kernels_busy_time_and_waits(tmp_path, graphs):
    done = subprocess.run(
        [
            sys.executable, "-m", "server.cli.main", "bench", "engine", "--profile", "--device=cuda",
            "--workloads", "batch1", "decode4", "ttft64", f"--cuda-graphs={graphs}", f"--json={tmp_path}/r.json",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    profiles = json.loads((tmp_path / "r.json").read_text())["profiles"]
    assert len(profiles) == 3
    for profile in profiles:
        gpu = profile["gpu"]
        assert gpu["launches"] >= 1
        assert 0 < gpu["busy_us"] < 2 * profile["step_us"]
        assert sum(k["added_us"] for k in gpu["kernels"]) == pytest.approx(gpu["busy_us"], rel=0.01)
        assert profile["phases_us"]["wait"] > 0
    # A decode step of few sequences is a single launch, a prompt is not.
    assert profiles[-1]["gpu"]["launches"] > 10
