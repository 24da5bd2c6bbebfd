"""The benchmark of attention for training: a dry run on the CPU, and what does not fit or is not supported."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import attention_training

TINY = ["--device=cpu", "--tokens=64", "--columns=64", "--head-dims", "32", "--lengths", "16", "64"]


def rows(folder, *arguments):
    attention_training.main([*TINY, *arguments, f"--out={folder}", "--commit=abc"])
    return json.loads((folder / "cpu-attention-training-abc.json").read_text())["rows"]


def test_a_dry_run_on_the_cpu_measures_every_length_and_mask(tmp_path):
    found = rows(tmp_path, "--peers", "math", "flash")
    ours = [row for row in found if row["kernel"] == "tessera"]
    assert [(row["length"], row["causal"]) for row in ours] == [
        (16, False), (16, True), (64, False), (64, True),
    ]  # fmt: skip
    for row in ours:
        assert row["forward_ms"] > 0 < row["backward"]
        assert row["peak_mib"] is None
    assert len(found) == 3 * len(ours)


def test_one_mask_can_be_chosen(tmp_path):
    assert {row["causal"] for row in rows(tmp_path, "--masks", "causal", "--peers")} == {True}


@pytest.mark.parametrize(
    ("error", "entry", "said"),
    [
        (torch.OutOfMemoryError("too large"), {"out_of_memory": True}, "does not fit in memory"),
        (RuntimeError("No available kernel.\nmore"), {"unsupported": "No available kernel."}, "No available kernel."),
    ],
)  # fmt: skip
def test_a_contender_that_cannot_run_says_why(tmp_path, monkeypatch, capsys, error, entry, said):
    def peer(_backend, _causal):
        def compute(*_tensors):
            raise error

        return compute

    monkeypatch.setattr(attention_training, "compare", lambda *_: None)
    monkeypatch.setattr(attention_training, "peer", peer)
    found = rows(tmp_path, "--peers", "math", "--masks", "causal")
    theirs = [row for row in found if row["kernel"] == "math"]
    assert all(entry.items() <= row.items() for row in theirs)
    assert capsys.readouterr().out.count(said) == 2
