"""The benchmark of a training step of `transformers`: contenders compute the same."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import transformers_step
from server.cli.bench.engine.options import SHAPES

CPU = torch.device("cpu")


@pytest.mark.parametrize("documents", [1, 3])
def test_all_contenders_have_the_same_losses(documents, tmp_path):
    config = json.loads((SHAPES / "llama-3.2-1b" / "config.json").read_text())
    config |= {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))

    rows = [
        transformers_step.measure(name, tmp_path, 50, documents, CPU, steps=1)
        for name in ("tessera", "sdpa", "eager")
    ]

    for row in rows:
        assert row["first_loss"] == pytest.approx(rows[0]["first_loss"], abs=0.02)
        assert row["last_loss"] == pytest.approx(rows[0]["last_loss"], abs=0.02)
        assert row["tokens_per_s"] > 0


def test_documents_begin_at_position_0():
    batch = transformers_step.make_batch(100, 10, 3, CPU)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]
