"""Attention by length: bytes that tiles move, memory, and a dry run of the whole script on the CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import attention, attention_peers
from benchmarks.attention_inputs import make_inputs
from benchmarks.attention_report import TABLES
from benchmarks.attention_shapes import LENGTHS, TINY_LENGTHS, Shape
from benchmarks.attention_traffic import least_bytes, standard_bytes, tile_bytes
from tests.kernels import triton_interpreter


def test_tiles_read_the_keys_that_their_rows_see():
    full = Shape("prefill", 4, 4, 64, 2, 256, causal=False)
    inputs_and_outputs = 2 * 2 * 256 * 4 * 64 * 2
    # Two tiles of 128 queries read all 256 keys and values, for each head and sequence.
    assert (
        tile_bytes(full, "bfloat16", 128, 64) == 2 * 4 * 2 * 256 * 2 * 64 * 2 + inputs_and_outputs
    )
    causal = Shape("prefill", 4, 4, 64, 2, 256)
    assert tile_bytes(causal, "bfloat16", 128, 64) == 2 * 4 * 384 * 2 * 64 * 2 + inputs_and_outputs
    # A step of 256 keys is read as a whole, up to the end of the sequence.
    assert tile_bytes(causal, "bfloat16", 128, 256) == tile_bytes(full, "bfloat16", 128, 64)


def test_the_heads_of_a_group_share_a_tile():
    alone = Shape("prefill", 4, 4, 64, 1, 256, causal=False)
    group = Shape("prefill", 4, 1, 64, 1, 256, causal=False)
    keys_alone = tile_bytes(alone, "float16", 128, 64) - 2 * 256 * 4 * 64 * 2
    assert tile_bytes(group, "float16", 128, 64) - 2 * 256 * 4 * 64 * 2 == keys_alone
    assert tile_bytes(group, "float16", 1024, 64) == least_bytes(group, "float16")


def test_the_least_is_every_input_and_output_once_and_the_standard_has_the_scores_four_times():
    shape = Shape("prefill", 8, 2, 128, 3, 100)
    least = (2 * 8 + 2 * 2) * 3 * 100 * 128 * 2
    assert least_bytes(shape, "bfloat16") == least
    assert standard_bytes(shape, "bfloat16") == least + 4 * 8 * 3 * 100 * 100 * 2


def test_lengths_go_from_128_to_131072():
    assert [shape.length for shape in LENGTHS] == [2**power for power in range(7, 18)]
    assert all(shape.batch * shape.length == 16384 for shape in LENGTHS if shape.length <= 16384)


def test_a_peer_that_does_not_fit_is_named(monkeypatch):
    def attend(*_tensors, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(attention_peers.functional, "scaled_dot_product_attention", attend)
    inputs = make_inputs(TINY_LENGTHS[0], "float16", torch.device("cpu"), paged=False)

    record = attention_peers.time_peers(inputs, inputs.out, torch.device("cpu"))

    assert record["peers_out_of_memory"] == ["cudnn", "fa2", "math"]
    assert record["peer_tflops"] == {}


@triton_interpreter.interpreted
def test_a_dry_run_on_the_cpu_writes_the_series_and_its_table(tmp_path, monkeypatch, capsys):
    words = "attention --rows tiny-lengths --device cpu --kernel portable_prefill --dtype float16 --commit abc --out"
    monkeypatch.setattr(sys, "argv", [*words.split(), str(tmp_path)])

    attention.main()

    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert path.name == "cpu-attention-lengths-abc.json"
    assert [row["seqlen"] for row in record["rows"]] == [16, 32, 64]
    for row in record["rows"]:
        assert row["series"] == "lengths"
        assert row["peer_tflops"]["math"] > 0
        assert row["moved_mib"]["standard"] >= row["moved_mib"]["least"]
    assert "| 4 x 16 |" in capsys.readouterr().out
    tables = [belongs for belongs, _ in TABLES if belongs(record["rows"][0])]
    assert len(tables) == 1


@pytest.mark.parametrize("name", ["cudnn", "math"])
def test_a_length_that_does_not_fit_says_so_in_the_table(name):
    row = {
        "series": "lengths", "phase": "prefill", "batch": 1, "seqlen": 131072, "tflops": 600.0, "peak_mib": 512.0,
        "peer_tflops": {"fa2": 300.0}, "peer_peak_mib": {"fa2": 512.5}, "peers_out_of_memory": [name],
        "moved_mib": {"tiles": 5.0, "least": 1.0, "standard": 70_000.0},
    }  # fmt: skip
    (table,) = [table for belongs, table in TABLES if belongs(row)]
    assert table([row])[-1].count("does not fit") == 1
    assert table([row])[-1].endswith("| 5 | 1 | 70000 |")
