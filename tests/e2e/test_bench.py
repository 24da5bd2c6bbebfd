"""`tessera bench` against the real service, as commands of their own."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "server.main", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_service_is_measured_over_http_with_prompts_of_an_exact_length(
    bundled_service, tmp_path
):
    before = bundled_service.metric("tessera_prompt_tokens_total")
    done = bench(
        "serve", f"--url={bundled_service.url}", "--concurrency", "1", "4", "--prompts=8",
        "--input-len=32", "--output-len=16", "--processes=2", f"--json={tmp_path}/r.json",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "not exactly" not in done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    for run in result["runs"]:
        assert (run["completed"], run["failed"], run["short"], run["uncounted"]) == (8, 0, 0, 0)
        assert (run["input_tokens"], run["output_tokens"]) == (8 * 32, 8 * 16)
        assert run["itl_ms"]["count"] == 8 * 15
    sent = (1 + 8) + (4 + 8)
    assert bundled_service.metric("tessera_prompt_tokens_total") - before == sent * 32
    assert result["server"].startswith("tessera")
    assert {row["model"] for row in result["rows"]} == {"bundled"}
