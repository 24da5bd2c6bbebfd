"""Every row of the registry that runs on a CPU, against the reference, over poisoned memory."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kernels
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from kernels.cpu.library import load
from tests.kernels.references.problems import Layout, assert_no_worse_than, make_case

DTYPES = ("float32", "bfloat16")
ROWS = [
    pytest.param(row, id=row.name)
    for row in REGISTRY
    if row.cpu and not (row.in_library and isinstance(load(), str))
]
DECODE_ROWS = [row for row in ROWS if row.values[0].phase is Phase.DECODE]
PREFILL_ROWS = [row for row in ROWS if row.values[0].phase is Phase.PREFILL]


def in_dtypes(rows, *dtypes):
    """Parametrize with rows and those of some dtypes that they support."""
    found = [
        pytest.param(row.values[0], dtype, id=f"{row.id}-{dtype}")
        for row in rows
        for dtype in dtypes
        if dtype in row.values[0].dtypes
    ]
    return pytest.mark.parametrize(("row", "dtype"), found)


LAYOUTS = [pytest.param(layout, id=layout.value) for layout in Layout]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def problem(phase, dtype="float32", heads=6, kv_heads=2, head_dim=32, block_size=16, **more):
    return AttentionProblem(
        phase, dtype, heads, kv_heads, head_dim, block_size, head_dim**-0.5, **more
    )


@in_dtypes(DECODE_ROWS, *DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_agrees_with_the_reference_around_block_boundaries(row, layout, dtype):
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 100]
    case = make_case(problem(Phase.DECODE, dtype), [1] * 10, lengths, layout=layout)

    case.check(case.run(row))


@in_dtypes(DECODE_ROWS, *DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_agrees_with_the_reference_for_long_beside_short_sequences(row, layout, dtype):
    lengths = [1500, 3, 2100, 40, 700, 17]
    case = make_case(problem(Phase.DECODE, dtype, head_dim=64), [1] * 6, lengths, layout=layout)

    case.check(case.run(row))


@in_dtypes(DECODE_ROWS, *DTYPES)
@pytest.mark.parametrize("length", [1, 16, 65, 1025])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_of_a_single_sequence_agrees_with_the_reference(row, length, layout, dtype):
    case = make_case(problem(Phase.DECODE, dtype, head_dim=64), [1], [length], layout=layout)

    case.check(case.run(row))


@in_dtypes(PREFILL_ROWS, *DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_agrees_with_the_reference_over_ragged_chunks(row, layout, dtype):
    query_lens = [1, 2, 15, 16, 17, 1, 5, 70, 130, 40]
    seq_lens = [1, 2, 15, 16, 17, 33, 48, 70, 200, 300]
    case = make_case(problem(Phase.PREFILL, dtype), query_lens, seq_lens, layout=layout)

    case.check(case.run(row))


@in_dtypes(PREFILL_ROWS, *DTYPES)
def test_prefill_agrees_with_the_reference_around_tile_boundaries(row, dtype):
    query_lens = [63, 64, 65, 127, 128, 129]
    seq_lens = [63, 64, 66, 200, 128, 129]
    case = make_case(problem(Phase.PREFILL, dtype, heads=2, kv_heads=1), query_lens, seq_lens)

    case.check(case.run(row))


@in_dtypes(ROWS, *DTYPES, "float16")
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(2, 2), (6, 2), (8, 2), (14, 2), (16, 2), (8, 1)],
    ids=["1", "3", "4", "7", "8", "one kv head"],
)
def test_every_group_size_agrees_with_the_reference(row, heads, kv_heads, dtype):
    query_lens = [1, 1, 1] if row.phase is Phase.DECODE else [33, 3, 70]
    case = make_case(problem(row.phase, dtype, heads, kv_heads), query_lens, [33, 70, 71])

    case.check(case.run(row))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("window", [1, 15, 16, 17, 40, 1000])
@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.FRAGMENTED])
def test_sliding_window_agrees_with_the_reference(row, window, layout):
    query_lens = [1, 1, 1, 1] if row.phase is Phase.DECODE else [1, 17, 70, 20]
    case = make_case(
        problem(row.phase, sliding_window=window), query_lens, [16, 17, 100, 90], layout=layout
    )

    case.check(case.run(row))


@pytest.mark.parametrize("row", ROWS)
def test_blocks_outside_the_window_are_never_read(row):
    query_lens = [1] if row.phase is Phase.DECODE else [5]
    case = make_case(problem(row.phase, sliding_window=20), query_lens, [100])
    first_visible = 100 - query_lens[0] - 20 + 1
    for block in case.block_table[0][: first_visible // 16]:
        case.kv[:, block] = float("nan")

    out = case.run(row)

    assert torch.isfinite(out).all()


@in_dtypes(ROWS, *DTYPES)
@pytest.mark.parametrize("window", [None, 30])
def test_softcap_agrees_with_the_reference(row, dtype, window):
    query_lens = [1, 1, 1] if row.phase is Phase.DECODE else [1, 20, 70]
    case = make_case(
        problem(row.phase, dtype, softcap=2.0, sliding_window=window),
        query_lens,
        [5, 40, 71],
        layout=Layout.TWO_RUNS,
    )

    case.check(case.run(row))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_every_block_size_agrees_with_the_reference(row, block_size):
    query_lens = [1, 1, 1] if row.phase is Phase.DECODE else [9, 1, 65]
    case = make_case(problem(row.phase, block_size=block_size), query_lens, [9, 33, 65])

    case.check(case.run(row))


@pytest.mark.parametrize("row", ROWS)
def test_values_of_one_give_one(row):
    query_lens = [1, 1] if row.phase is Phase.DECODE else [70, 20]
    case = make_case(problem(row.phase), query_lens, [70, 45])
    values = case.kv[1]
    values[~values.isnan()] = 1.0

    out = case.run(row)

    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-6)


@pytest.mark.parametrize("row", ROWS)
def test_the_cache_of_a_layer_may_be_a_slice_of_all_layers(row):
    query_lens = [1, 1] if row.phase is Phase.DECODE else [70, 20]
    case = make_case(problem(row.phase), query_lens, [70, 45])
    layers = torch.full((3, *case.kv.shape), float("nan"))
    layers[1] = case.kv

    out = dataclasses.replace(case, kv=layers[1]).run(row)

    case.check(out)


@pytest.mark.parametrize("row", ROWS)
def test_queries_may_be_a_slice_of_a_wider_tensor(row):
    query_lens = [1, 1] if row.phase is Phase.DECODE else [70, 20]
    case = make_case(problem(row.phase), query_lens, [70, 45])
    wide = torch.full((case.q.shape[0], 10, 32), float("nan"))
    wide[:, :6] = case.q

    out = dataclasses.replace(case, q=wide[:, :6]).run(row)

    case.check(out)


@in_dtypes(ROWS, *DTYPES)
def test_repeating_a_call_gives_the_same_bits(row, dtype):
    query_lens = [1] * 5 if row.phase is Phase.DECODE else [30, 70, 1, 2, 20]
    case = make_case(problem(row.phase, dtype), query_lens, [30, 70, 500, 800, 90])
    first = case.run(row)

    assert all(torch.equal(case.run(row), first) for _ in range(5))


@pytest.mark.parametrize("layout", [Layout.TWO_RUNS, Layout.FRAGMENTED], ids=lambda x: x.value)
@pytest.mark.parametrize("phase", list(Phase))
def test_the_layout_of_blocks_does_not_change_the_result(layout, phase):
    query_lens = [1, 1, 1] if phase is Phase.DECODE else [30, 70, 10]
    plain = make_case(problem(phase, head_dim=64), query_lens, [30, 1500, 40])
    moved = make_case(problem(phase, head_dim=64), query_lens, [30, 1500, 40], layout=layout)

    outs = [case.run() for case in (plain, moved)]

    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 5], [130], [64, 1, 65], [17, 113]], ids=str)
def test_prefill_in_chunks_equals_prefill_in_one(chunks):
    total = sum(chunks)
    whole = make_case(problem(Phase.PREFILL), [total], [total])
    expected = whole.run()

    done, pieces = 0, []
    for chunk in chunks:
        batch = dataclasses.replace(
            whole.batch,
            cu_seqlens_q=torch.tensor([0, chunk], dtype=torch.int32),
            seq_lens=torch.tensor([done + chunk], dtype=torch.int32),
            num_tokens=chunk,
            max_seqlen_q=chunk,
            max_seqlen_k=done + chunk,
        )
        piece = dataclasses.replace(whole, batch=batch, q=whole.q[done : done + chunk])
        pieces.append(piece.run())
        done += chunk

    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=2e-6)


def test_decode_token_by_token_equals_prefill_in_one():
    whole = make_case(problem(Phase.PREFILL), [40], [40])
    expected = whole.run()

    for position in range(40):
        batch = dataclasses.replace(
            whole.batch,
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([position + 1], dtype=torch.int32),
            num_tokens=1,
            max_seqlen_q=1,
        )
        one = dataclasses.replace(
            whole, problem=problem(Phase.DECODE), batch=batch, q=whole.q[position : position + 1]
        )
        torch.testing.assert_close(one.run()[0], expected[position], rtol=0, atol=2e-6)


@pytest.mark.parametrize("planned", [False, True], ids=["planned normally", "planned in inference"])
@pytest.mark.parametrize("run", [False, True], ids=["run normally", "run in inference"])
@pytest.mark.parametrize("phase", list(Phase))
def test_a_plan_runs_in_and_outside_inference_mode(phase, planned, run):
    with torch.inference_mode(mode=False):
        case = make_case(problem(phase), [1] * 8, [20] * 8)
    with torch.inference_mode(planned):
        plan = kernels.plan_attention(case.problem, case.batch)
    attend = kernels.decode_attention if phase is Phase.DECODE else kernels.prefill_attention

    with torch.inference_mode(run):
        out = torch.empty_like(case.q)
        attend(case.q, case.kv, plan, out)

    case.check(out)


def test_decode_rows_without_tokens_become_zero():
    case = make_case(problem(Phase.DECODE), [1, 1, 1], [0, 20, 0])

    out = case.run()

    assert torch.equal(out[[0, 2]], torch.zeros(2, 6, 32))
    case.check(out)


def test_prefill_skips_sequences_without_queries():
    case = make_case(problem(Phase.PREFILL), [3, 0, 2], [3, 20, 9])

    case.check(case.run())


@pytest.mark.parametrize("phase", list(Phase))
def test_offsets_past_two_to_the_thirty_one_are_read_correctly(phase):
    # The cache is mostly virtual memory: `empty` touches no page, and the sequence touches a few.
    small = make_case(problem(phase, "bfloat16", 2, 2, 64), [1], [40])
    blocks = 2**31 // (2 * 16 * 2 * 64) + 8
    kv = torch.empty((2, blocks, 16, 2, 64), dtype=torch.bfloat16)
    table = [blocks - 4, blocks - 3, blocks - 2]
    for here, there in zip(small.block_table[0], table, strict=True):
        kv[:, there] = small.kv[:, here]
    assert kv.numel() > 2**31
    moved = dataclasses.replace(
        small,
        kv=kv,
        block_table=[table],
        batch=dataclasses.replace(
            small.batch, block_table=torch.tensor([table], dtype=torch.int32)
        ),
    )

    assert torch.equal(moved.run(), small.run())


def test_the_tolerance_rule_rejects_more_than_twice_the_error_of_plain_pytorch():
    truth = torch.zeros(4)

    with pytest.raises(AssertionError, match=r"largest error 0.3, allowed 0.2"):
        assert_no_worse_than(torch.full((4,), 0.3), truth, torch.full((4,), 0.1))


def test_the_tolerance_rule_allows_for_the_summation_order_of_large_sums():
    truth = torch.full((4,), 100.0, dtype=torch.float64)

    assert_no_worse_than(torch.full((4,), 100.0 + 6e-5), truth, truth)
    with pytest.raises(AssertionError, match=r"allowed 9.54e-05"):
        assert_no_worse_than(torch.full((4,), 100.0 + 2e-4), truth, truth)


def test_the_tolerance_rule_rejects_values_that_are_not_finite():
    out = torch.tensor([0.0, float("nan")])

    with pytest.raises(AssertionError, match="1 of 2 values are not finite"):
        assert_no_worse_than(out, torch.zeros(2), torch.zeros(2))


def test_the_tolerance_rule_rejects_a_reference_that_is_not_finite():
    unknown = torch.tensor([0.0, float("nan")])

    with pytest.raises(AssertionError, match="largest error nan"):
        assert_no_worse_than(torch.zeros(2), unknown, torch.zeros(2))
    with pytest.raises(AssertionError, match="allowed nan"):
        assert_no_worse_than(torch.zeros(2), torch.zeros(2), unknown)
    with pytest.raises(AssertionError, match="allowed inf"):
        assert_no_worse_than(torch.zeros(2), torch.tensor([0.0, math.inf]), torch.zeros(2))
