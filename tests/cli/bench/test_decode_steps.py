"""`benchmarks.decode_steps` as a dry run on the CPU."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import decode_steps


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_each_number_of_sequences_and_each_context_is_timed(
    monkeypatch, tmp_path, capsys, kv_cache_dtype
):
    arguments = [
        "--device=cpu", "--model=bundled", "--sequences", "1", "3", "--contexts", "17", "40",
        "--rounds=2", f"--kv-cache-dtype={kv_cache_dtype}", f"--out={tmp_path}", "--commit=abc",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["decode_steps", *arguments])

    decode_steps.main()

    rows = json.loads((tmp_path / "cpu-steps-abc.json").read_text())["rows"]
    assert [(row["sequences"], row["context"]) for row in rows] == [
        (1, 17),
        (3, 17),
        (1, 40),
        (3, 40),
    ]
    assert all(len(row["us_rounds"]) == 2 and row["us"] > 0 for row in rows)
    assert "bundled 3 x 40, us: table" in capsys.readouterr().out


def test_a_step_continues_from_the_tokens_of_the_previous_one():
    device = decode_steps.torch.device("cpu")
    model = decode_steps._load("bundled", device)
    cache = decode_steps._cache(model, 3, 33, "auto")
    compute = decode_steps.step(model, cache, 3, 33, decode_steps.TABLE)

    sampled = compute()
    first = sampled.clone()
    sampled += decode_steps.torch.arange(1, 4)
    compute()

    assert len(sampled) == 3
    assert ((sampled >= 0) & (sampled < model.network.vocab)).all()
    assert not sampled.equal(first)
