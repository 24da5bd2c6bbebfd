"""The benchmark of a training step: contenders compute the same, and a dry run on the CPU."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import training_step
from model.training.network import attend_packed

CPU = torch.device("cpu")
TINY = training_step._MODELS["tiny"]


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH])
def test_padded_attention_equals_that_of_packed_documents(backend):
    batch, _ = training_step.make_batch(TINY, None, CPU)
    torch.manual_seed(0)
    q, k, v = (torch.randn(len(batch.inputs), heads, 16) for heads in (4, 2, 2))
    found = training_step.padded(batch, backend)(q, k, v, batch.cu_seqlens)
    torch.testing.assert_close(found, attend_packed(q, k, v, batch.cu_seqlens))


def test_all_contenders_have_the_same_losses():
    rows = [
        training_step.measure(name, TINY, None, CPU, steps=1, compiled=False)
        for name in ("tessera", "sdpa", "math")
    ]
    assert {row["first_loss"] for row in rows} == {rows[0]["first_loss"]}
    assert all(abs(row["last_loss"] - rows[0]["last_loss"]) < 1e-2 for row in rows)
    assert all(row["tokens_per_s"] > 0 and row["peak_mib"] is None for row in rows)


@pytest.mark.slow
def test_a_dry_run_on_the_cpu_writes_a_row_of_each_contender(tmp_path):
    training_step.main(
        [
            "--model=tiny",
            "--device=cpu",
            "--steps=1",
            "--no-compile",
            f"--out={tmp_path}",
            "--commit=abc",
        ]
    )
    record = json.loads((tmp_path / "cpu-training-step-abc.json").read_text())
    assert [row["contender"] for row in record["rows"]] == ["tessera", "sdpa", "math"]
    assert all(row["batch_tokens"] == 256 for row in record["rows"])


def test_a_contender_that_does_not_fit_says_so(monkeypatch, capsys):
    def measure(*_arguments, **_options):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(training_step, "measure", measure)
    training_step.main(["--model=tiny", "--only=math", "--device=cpu"])
    assert json.loads(capsys.readouterr().out) == {"out_of_memory": True}
