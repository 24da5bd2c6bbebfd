"""aiperf, NVIDIA's load generator, measures the service.

It pins older versions of libraries that Tessera needs, so it is installed apart: `pipx install aiperf`.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import model

CHECKPOINT = Path(model.__file__).parent / "bundled"
TOKENS = 24


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_completes_its_requests_and_counts_the_same_tokens(
    bundled_service, tmp_path, endpoint
):
    program = shutil.which("aiperf")
    if program is None:
        # Not in the test environment: see above.
        pytest.skip("aiperf is not on the PATH; `pipx install aiperf` installs it")
    run = subprocess.run(
        [
            program, "profile", "--url", bundled_service.url, "--model", "bundled",
            "--endpoint-type", endpoint, "--streaming", "--tokenizer", str(CHECKPOINT),
            "--concurrency", "4", "--request-count", "12", "--extra-inputs", "ignore_eos:true",
            "--synthetic-input-tokens-mean", "64", "--synthetic-input-tokens-stddev", "0",
            "--output-tokens-mean", str(TOKENS), "--output-tokens-stddev", "0",
            "--artifact-dir", str(tmp_path / "results"), "--ui", "none",
        ],
        check=False, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip

    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    figures = json.loads((tmp_path / "results" / "profile_export_aiperf.json").read_text())
    assert figures["request_count"]["avg"] == 12
    assert not figures["error_summary"]
    assert figures["usage_completion_tokens"]["avg"] == TOKENS
    assert 0 < figures["time_to_first_token"]["avg"] < figures["request_latency"]["avg"]
    assert figures["inter_token_latency"]["avg"] > 0
