"""The parts of the attention benchmark that need no GPU: rows, candidates, tables and result files."""

from __future__ import annotations

import argparse
import json
import sys

import pytest
import torch

import kernels
from benchmarks import attention, attention_fp8, report
from benchmarks.attention_fp8 import (
    FA3,
    has_fp8_cache_row,
    has_fp8_row,
    measure_errors,
    time_fp8_cache,
)
from benchmarks.attention_inputs import make_inputs, parse_launch, problem_of
from benchmarks.attention_report import summary
from benchmarks.attention_shapes import DECODE, MORE_DECODE, MORE_PREFILL, PREFILL, TINY, Shape
from benchmarks.tune_grid import candidates
from docs.attention_table import attention_table
from kernels.arch import CATALOGUE
from kernels.attention.launch import LaunchConfig
from kernels.attention.registry import REGISTRY
from kernels.attention.tuned import tuned_launches
from tests.kernels.references import reference
from tests.kernels.tuning_check import shared_memory_estimate

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


def test_every_row_of_the_peers_tables_has_the_best_peer_as_its_bar():
    assert (len(PREFILL), len(DECODE)) == (12, 30)
    assert all(shape.bar == max(shape.peers.values()) for shape in PREFILL)
    assert all(shape.bar == min(shape.peers.values()) for shape in DECODE)


def test_flops_count_the_causal_half_and_bytes_count_every_key_and_value():
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
    assert "; 2026-01-01; `" in text  # followed by the name of the file
    assert "other" not in text


def test_the_documents_table_shows_prefill_by_length_from_results_of_its_own():
    text = attention_table()

    assert "Prefill by length, causal" in text
    assert "--rows lengths`" in text


def test_a_decode_by_several_kernels_is_one_line_of_a_separate_table(tmp_path):
    rows = [
        decode_row(us) | {"beside": name}
        for us, name in ((40.0, "first"), (25.0, "second:block_n=128"))
    ]
    write_result(tmp_path, "2026-01-01", [decode_row(30.0), *rows])

    text = attention_table(tmp_path)

    assert "| first | share | second:block_n=128 | share | times faster |" in text
    assert "| 32/8/128 | 8x1024 | 40.0 | 43% | 25.0 | 43% | 1.60 |" in text
    assert text.count("| 32/8/128 | 8 x 1024 |") == 1


def test_a_kernel_is_timed_with_the_launch_that_its_name_has():
    shape = Shape("decode", 9, 3, 128, 256, 184)
    given = argparse.Namespace(device="cpu", launch="num_stages=4")
    asked = problem_of(shape, "bfloat16")

    plain, own, other = (
        attention.choose(asked, shape, given, name)
        for name in ("", "hopper_keys_on_m_decode:block_n=128", "hopper_keys_on_m_decode")
    )

    assert (plain.spec.name, own.spec.name) == ("hopper_decode", "hopper_keys_on_m_decode")
    launches = [it.launch_for(184, 256) for it in (own, other)]
    assert [(it.block_n, it.num_stages) for it in launches] == [(128, 2), (64, 4)]


def test_decodes_with_a_shared_prefix_have_a_separate_table(tmp_path):
    shared = {"size": "64x(8192 shared + 128)", "us_without_sharing": 400.0, "gain": 8.0}
    rows = [decode_row(25.0), decode_row(50.0) | shared]
    write_result(tmp_path, "2026-01-01", rows)

    text = attention_table(tmp_path)

    assert "| 32/8/128 | 64x(8192 shared + 128) | **50.0** | 400.0 | **8.0** | 43% |" in text
    assert text.count("64x(8192 shared + 128)") == 1


def test_fp8_prefills_have_a_separate_table(tmp_path):
    rmse = {"half": 3e-4, "per_tensor": 2.6e-2, "fp8": 1e-2, "per_tensor_over_fp8": 2.6}
    fp8 = {"tflops": 800.0, "gain": 2.0}
    rows = [ROWS[0] | {"fp8_prefill": fp8 | {"rmse": rmse, "fa3_tflops_elsewhere": 561.0}}, ROWS[1]]
    write_result(tmp_path, "2026-01-01", rows)

    text = attention_table(tmp_path)

    assert (
        "| 32/8/128 | 4 x 4096 | 400 | **800** | 2.00 | 561 | 3.0e-04 | 2.6e-02 | 1.0e-02 | 2.60 |"
        in text
    )


def test_decodes_over_an_fp8_cache_have_a_separate_table(tmp_path):
    row = decode_row(40.0) | {"fp8_cache": {"us": 22.35, "gain": 1.79, "difference": 0.021}}
    write_result(tmp_path, "2026-01-01", [row])

    assert "| 8 x 1024 | 40.0 | **22.4** | **1.79** | 2.1% |" in attention_table(tmp_path)


def test_a_decode_over_an_fp8_cache_is_compared_with_one_in_half_precision(monkeypatch):
    monkeypatch.setattr(attention_fp8, "arch_of", lambda _device: kernels.detect("cpu"))
    shape = next(shape for shape in TINY if shape.phase == "decode")
    inputs = make_inputs(shape, "float16", torch.device("cpu"))
    inputs.run(kernels.plan_attention(inputs.problem, inputs.batch))

    found = time_fp8_cache(inputs, 100.0)["fp8_cache"]

    assert found["kernel"] == "torch_decode"
    assert 0.0 < found["difference"] < 0.06
    inputs.out.neg_()
    with pytest.raises(AssertionError, match="from half precision"):
        time_fp8_cache(inputs, 100.0)


def test_the_decodes_that_read_the_most_are_also_measured_over_an_fp8_cache():
    found = [shape for shape in DECODE if has_fp8_cache_row(shape)]

    assert {(s.batch, s.length) for s in found} == {
        (1, 131072), (8, 8192), (32, 4096), (128, 1024), (128, 4096), (256, 1024),
    }  # fmt: skip


def test_the_long_prefills_of_the_peers_tables_are_also_measured_in_fp8():
    shapes = [shape for shape in (*PREFILL, *MORE_PREFILL) if has_fp8_row(shape)]

    assert {((s.hq, s.hkv, s.d), s.batch, s.length) for s in shapes} == set(FA3)


def test_errors_are_measured_against_float64_on_inputs_with_outliers(monkeypatch):
    def half(problem, q, kv):
        options = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
        out = reference.attention(q, *kv, **options, dtype=torch.float64)
        return out + 0.25 if problem.kv_dtype else out.to(torch.bfloat16)

    monkeypatch.setattr("benchmarks.attention_fp8._attend", half)
    shape = Shape("prefill", 4, 2, 64, 1, 300)

    errors = measure_errors(problem_of(shape, "bfloat16", paged=False), 300, torch.device("cpu"))

    assert errors["fp8"] == pytest.approx(0.25)
    assert errors["half"] < errors["per_tensor"] < 0.1
    assert errors["per_tensor_over_fp8"] == pytest.approx(errors["per_tensor"] / 0.25, rel=1e-3)


def test_a_shared_prefix_is_in_the_same_blocks_and_counted_once():
    shape = next(shape for shape in TINY if shape.shared)
    inputs = make_inputs(shape, "float32", torch.device("cpu"))
    table = inputs.batch.block_table

    assert inputs.batch.shared_prefix == 64
    assert (table[:, :4] == table[0, :4]).all()
    assert table[:, 4:].unique().numel() == table[:, 4:].numel() == 6
    assert inputs.kv.shape[1] == 10
    assert str(shape) == "decode 4/2/32 3x(64 shared + 26)"
    assert shape.kv_bytes("float32") == 2 * (64 + 3 * 26) * 2 * 32 * 4


def test_without_results_the_documents_table_states_that_nothing_was_measured(tmp_path):
    assert attention_table(tmp_path).startswith("Nothing has been measured")


def test_the_summary_counts_the_rows_that_reach_the_best_peer():
    rows = [prefill_row(paged=False, tflops=624.0), prefill_row(paged=True, tflops=700.0)]
    more = [
        row | {"size": "4x4096 w99", "window": 99, "peer_tflops_elsewhere": {}, "peer_tflops": {}}
        for row in rows
    ]

    prefill = "\n".join(summary([*rows, *more]))
    decode = "\n".join(summary([decode_row(25.0), decode_row(27.5), decode_row(40.0)]))

    assert (
        "packed: at or above the best in 1 of 1 rows of the peers' tables, 1.05 times in 0; above FA2 in 1 of 1"
        in prefill
    )
    assert (
        "paged: at or above the best in 1 of 1 rows of the peers' tables, 1.05 times in 1"
        in prefill
    )
    assert decode == "decode: at most the time of the better peer in 2 of 3 rows"


def test_rows_that_are_not_in_the_peers_tables_have_a_separate_table(tmp_path):
    special = {"size": "1x512+8192", "history": 8192, "peer_tflops_elsewhere": {}}
    rows = [row | special | {"peer_tflops": {"fa2": 250.0}} for row in ROWS]
    write_result(tmp_path, "2026-01-01", [*ROWS, *rows])
    ragged = decode_row(400.0) | {"size": "64x(100-16000)", "peer_us_elsewhere": {}}
    del ragged["ratio_to_best_peer"]
    write_result(tmp_path, "2026-01-02", [ragged])

    text = attention_table(tmp_path)

    assert "| 32/8/128 | 1x512+8192 | **400** | **300** | 50% |  | 250 | 1.60 |" in text
    assert text.count("| 32/8/128 | 4 x 4096 |") == 1
    assert "| 32/8/128 | 64x(100-16000) | **400.0** | 1300 | 43% |" in text


def pairs_by_hand(shape):
    return sum(
        1
        for queries, keys in zip(shape.query_lens, shape.seq_lens, strict=True)
        for query in range(keys - queries, keys)
        for key in range(keys)
        if (key <= query or not shape.causal)
        and (shape.window is None or key > query - shape.window)
    )


@pytest.mark.parametrize("shape", [*TINY, Shape("prefill", 4, 2, 32, 2, 30, window=50)], ids=str)
def test_flops_are_counted_from_the_visible_pairs_of_query_and_key(shape):
    counted = shape.flops / (4 * shape.d * shape.hq)

    # A causal triangle counts half of its diagonal.
    slack = 0.5 * sum(shape.query_lens) if shape.causal and shape.phase == "prefill" else 0
    assert counted <= pairs_by_hand(shape) <= counted + slack


def test_the_lengths_of_mixed_and_ragged_batches_match_their_names():
    mix, spread, skewed = MORE_PREFILL[0], *MORE_DECODE
    half = sorted(mix.lengths)[len(mix.lengths) // 2]

    assert 100 < half < 220
    assert 1500 < max(mix.lengths) <= 4096
    assert all(100 <= length <= 16384 for shape in (spread, skewed) for length in shape.lengths)
    assert sum(skewed.lengths) < 0.6 * sum(spread.lengths)


def test_rows_have_unique_names():
    shapes = [*PREFILL, *DECODE, *MORE_PREFILL, *MORE_DECODE]

    assert len({str(shape) for shape in shapes}) == len(shapes)
    assert str(MORE_PREFILL[2]) == "prefill 32/8/128 1x512+8192"


@pytest.mark.parametrize(
    ("shape", "paged"),
    [
        pytest.param(shape, paged, id=f"{shape} {'paged' if paged else 'packed'}")
        for shape in TINY
        for paged in (True, False)
        if paged or shape.phase == "prefill"
    ],
)
def test_inputs_of_every_kind_of_row_are_checked_against_the_reference(shape, paged):
    inputs = make_inputs(shape, "float32", torch.device("cpu"), paged=paged)
    rules = {
        "softmax_scale": inputs.problem.softmax_scale,
        "causal": shape.causal,
        "sliding_window": shape.window,
    }
    parts = [
        reference.attention(q, *inputs.keys_and_values(seq), **rules)
        for seq, q in enumerate(inputs.q.split(shape.query_lens))
    ]
    right = torch.cat(parts)

    error, _ = inputs.check(right)

    assert error < 1e-5
    for row in (0, -1):
        wrong = right.clone()
        wrong[row] += 0.1
        with pytest.raises(AssertionError):
            inputs.check(wrong)


def test_a_given_launch_overrides_the_table_and_unknown_fields_are_rejected():
    base = LaunchConfig(64, 64, 4, 2)

    assert parse_launch("block_m=128,one_loop=1", base) == LaunchConfig(
        128, 64, 4, 2, one_loop=True
    )
    assert parse_launch("", base) == base
    with pytest.raises(ValueError, match="tile: not a field of a launch"):
        parse_launch("tile=3", base)


def test_candidates_exclude_launches_that_spill_or_do_not_fit():
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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_candidates_of_the_hopper_prefill_include_its_tables_and_fit(head_dim):
    h100 = CATALOGUE["h100"]
    spec = next(row for row in REGISTRY if row.name == "hopper_prefill")
    shape = Shape("prefill", 32, 8, head_dim, 1, 512)
    grid = candidates("hopper_prefill", head_dim, "bfloat16", h100)

    assert {row.launch for row in tuned_launches(spec, problem_of(shape, "bfloat16"), h100)} <= set(
        grid
    )
    assert {launch.block_m for launch in grid} <= spec.row_tiles
    assert all(
        shared_memory_estimate(launch, "bfloat16", head_dim) < h100.shared_memory_bytes
        for launch in grid
    )


@pytest.mark.parametrize(("head_dim", "stages"), [(64, {2, 3, 4}), (128, {2})])
def test_the_candidates_of_the_blackwell_prefill_are_the_stages_that_fit(head_dim, stages):
    grid = candidates("blackwell_prefill", head_dim, "bfloat16", CATALOGUE["b200"])

    assert {(launch.block_m, launch.block_n) for launch in grid} == {(256, 128)}
    assert {launch.num_stages for launch in grid} == stages


def test_a_result_is_named_after_the_given_commit_and_omits_its_output_folder(
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
