"""The attention benchmark's parts that decide without a GPU: rows, candidates, tables, result files."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import report
from benchmarks.attention_inputs import parse_launch
from benchmarks.attention_report import Ceilings, decode_table, prefill_table
from benchmarks.attention_shapes import DECODE, PREFILL
from benchmarks.tune_grid import candidates
from docs.attention_table import attention_table
from kernels.arch import CATALOGUE
from kernels.plan import LaunchConfig

HEADS = {"hq": 32, "hkv": 8, "d": 128, "dtype": "bfloat16"}


def prefill_row(*, paged, tflops):
    return HEADS | {
        "phase": "prefill",
        "batch": 4,
        "seqlen": 4096,
        "kernel": "portable_prefill",
        "paged": paged,
        "tflops": tflops,
        "share_of_ceiling": 0.5,
        "peer_tflops": {"cudnn": 590.0, "fa2": 310.0},
        "peer_tflops_elsewhere": {"fa3": 624.0, "cudnn": 591.0, "flashinfer": 573.0, "fa2": 305.0},
    }


def decode_row(us):
    return HEADS | {
        "phase": "decode",
        "batch": 8,
        "context": 1024,
        "kernel": "portable_decode",
        "paged": True,
        "us": us,
        "gbs": 1300.0,
        "share_of_ceiling": 0.43,
        "peer_us_elsewhere": {"fa3": 27.5, "flashinfer": 29.5},
        "ratio_to_best_peer": round(us / 27.5, 3),
    }


ROWS = [prefill_row(paged=False, tflops=400.0), prefill_row(paged=True, tflops=300.0)]


def write_result(folder, date, rows, **others):
    record = {
        "topic": "attention",
        "machine": "NVIDIA H100 80GB HBM3",
        "versions": {"triton": "3.6.0"},
        "commit": "abc1234",
        "date": date,
        "command": "python -m benchmarks.attention",
        "ceilings": {"gemm_tflops": 785.0, "copy_gbs": 3024.0},
        "peers_elsewhere": "somewhere",
        "rows": rows,
    }
    path = folder / f"h100-attention-{date[-2:]}.json"
    path.write_text(json.dumps(record | others))


def test_the_tables_of_the_peers_have_the_rows_that_the_limits_are_about():
    assert (len(PREFILL), len(DECODE)) == (12, 20)
    assert all(shape.bar == max(shape.peers.values()) for shape in PREFILL)
    assert all(shape.bar == min(shape.peers.values()) for shape in DECODE)


def test_operations_and_bytes_are_those_of_the_causal_half_and_of_every_key_and_value():
    prefill = next(shape for shape in PREFILL if str(shape) == "prefill 32/8/128 4x4096")
    decode = next(shape for shape in DECODE if str(shape) == "decode 32/8/128 128x4096")

    assert prefill.flops == 4 * 4096**2 * 128 * 32 * 0.5 * 4
    assert decode.kv_bytes("bfloat16") == 2 * 128 * 4096 * 8 * 128 * 2
    # The floor of the peers' table: 709 microseconds at 3.03 TB/s.
    assert decode.kv_bytes("bfloat16") / 3.03e12 * 1e6 == pytest.approx(709, abs=1)


def test_the_documents_table_shows_the_newest_result_of_each_phase(tmp_path):
    write_result(tmp_path, "2026-01-01", ROWS)
    write_result(tmp_path, "2026-01-02", [decode_row(25.0)])
    write_result(tmp_path, "2026-01-03", ROWS[:0], machine="other")

    text = attention_table(tmp_path)

    assert (
        "| 32/8/128 | 4 x 4096 | **400** | **300** | 50% | 590 | 310 | 624 | 573 | 624 | 0.64 | 0.48 | 1.29 |"
        in text
    )
    assert "| 32/8/128 | 8 x 1024 | **25.0** | 1300 | 43% | 27.5 | 29.5 | 0.91 |" in text
    assert "commit abc1234, 2026-01-01" in text
    assert "other" not in text


def test_the_documents_table_says_when_nothing_was_measured(tmp_path):
    assert attention_table(tmp_path).startswith("Nothing has been measured")


def test_the_short_tables_count_the_rows_that_reach_the_limits():
    ceilings = Ceilings(785.0, 3024.0)

    prefill = "\n".join(prefill_table(ROWS, ceilings))
    decode = "\n".join(
        decode_table([decode_row(25.0), decode_row(31.0), decode_row(40.0)], ceilings)
    )

    assert (
        "packed: at least 60% of the best from 4096 tokens on in 1 of 1 rows; above FA2 in 1"
        in prefill
    )
    assert (
        "paged: at least 60% of the best from 4096 tokens on in 0 of 1 rows; above FA2 in 0"
        in prefill
    )
    assert "at most 1.15x the better peer in 2 of 3 rows, faster in 1" in decode


def test_a_launch_is_read_over_the_table_s_and_unknown_fields_are_refused():
    base = LaunchConfig(64, 64, 4, 2)

    assert parse_launch("block_m=128,one_loop=1", base) == LaunchConfig(
        128, 64, 4, 2, one_loop=True
    )
    assert parse_launch("", base) == base
    with pytest.raises(ValueError, match="tile: not a field of a launch"):
        parse_launch("tile=3", base)


def test_candidates_leave_out_what_is_known_to_spill_and_what_cannot_fit():
    h100, a10 = CATALOGUE["h100"], CATALOGUE["a10"]
    everything = candidates("portable_prefill", 128, "bfloat16", h100)
    skipped = candidates(
        "portable_prefill",
        128,
        "bfloat16",
        h100,
        [{"head_dim": 128, "block_m": 128, "num_warps": 4}],
    )

    assert len(set(everything)) == len(everything)
    assert {(row.block_m, row.num_warps) for row in set(everything) - set(skipped)} == {(128, 4)}
    assert len(candidates("portable_prefill", 128, "bfloat16", a10)) < len(everything)


def test_a_result_is_named_after_the_given_commit_and_does_not_say_where_it_was_put(
    tmp_path, monkeypatch, capsys
):
    words = [
        "benchmarks/attention.py",
        "--rows",
        "quick",
        "--out",
        str(tmp_path),
        "--commit",
        "abc",
    ]
    monkeypatch.setattr(sys, "argv", words)

    path = report.write_report(
        "attention", [{"a": 1}], folder=tmp_path, revision="abc", extra={"ceilings": {}}
    )

    record = json.loads(path.read_text())
    assert path.name == "cpu-attention-abc.json"
    assert record["command"] == "python -m benchmarks.attention --rows quick"
    assert (record["commit"], record["rows"], record["ceilings"]) == ("abc", [{"a": 1}], {})
    assert "a=1" in capsys.readouterr().out
