"""The `tessera bench` commands, run as subprocesses against a real service."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "server.cli.main", "bench", *arguments],
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


SMALL = (
    "engine", "--device=cpu", "--log-level=warning", "--prompt-tokens=16", "--steps=32",
    "--lengths=10-40",
)  # fmt: skip


@pytest.mark.slow
def test_the_engine_is_measured_without_http_and_a_profile_of_its_steps_adds_up(tmp_path):
    workloads = ("--workloads", "batch1", "decode4", "ttft64", "mixed8")
    done = bench(*SMALL, *workloads, "--profile", "--commit=abc", f"--json={tmp_path}/")

    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "cpu-engine-bundled-abc.json").read_text())
    by_library = {"int8": ("cpu_step", "cpu_step"), "none": ("torch_prefill", "torch_decode")}
    assert tuple(result["plan"].values()) == by_library[result["quantization"]]
    assert list(result["plan"]) == ["prefill", "decode"]
    found = [(row["model"], row["metric"], row["batch"]) for row in result["rows"]]
    assert found == [
        ("bundled", "ready_s", 1),
        ("bundled", "ms_per_token", 1),
        ("bundled", "decode_tok_s", 4),
        ("bundled", "ttft_ms", 1),
        ("bundled", "mixed_tok_s", 8),
    ]
    assert all(row["value"] > 0 and row["roofline"] is None for row in result["rows"])
    assert [p["what"] for p in result["profiles"]] == [
        "decode step of 1 sequences at 72 tokens",
        "decode step of 4 sequences at 72 tokens",
        "prompt of 64 tokens",
    ]
    for profile in result["profiles"]:
        phases = profile["phases_us"]
        assert sum(phases.values()) == pytest.approx(profile["step_us"])
        for name in ("receive", "schedule", "pack", "launch", "commit", "publish"):
            assert phases[name] > 0
            assert name in done.stdout


def test_the_reason_is_printed_if_the_engine_cannot_start():
    done = bench(*SMALL, "--workloads=batch1", "--max-model-len=1000000")

    assert done.returncode == 1
    assert "own limit of" in done.stderr.splitlines()[-1]


def test_a_missing_model_is_named():
    done = bench(*SMALL, "--model=./qwen9")

    assert done.returncode == 1
    assert "tessera bench engine: error: no folder './qwen9'" in done.stderr


@pytest.mark.slow
def test_workloads_that_do_not_fit_the_model_are_left_out_with_a_message():
    done = bench(*SMALL, "--workloads", "ttft256", "batch1", "--max-model-len=40", "--profile")

    assert done.returncode == 0, done.stderr
    assert "skipped: 1 sequences: 48 tokens per sequence exceed the limit of 40" in done.stderr
    assert "skipped: a prompt of 256 tokens" in done.stderr
