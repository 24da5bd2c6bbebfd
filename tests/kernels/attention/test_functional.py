"""The argument checks of the public operations, and the writes to the cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from kernels.errors import ShapeError
from tests.kernels.references import reference
from tests.kernels.references.problems import Layout, make_case


def problem(phase=Phase.DECODE, dtype="float32"):
    return AttentionProblem(phase, dtype, 4, 2, 8, 16, 1.0)


@pytest.fixture
def case():
    return make_case(problem(), [1, 1], [20, 5])


def test_a_query_of_another_shape_is_rejected_with_both_shapes(case):
    plan = kernels.plan_attention(case.problem, case.batch)

    with pytest.raises(ShapeError, match=r"q is \[3, 4, 8\] .* takes q \[2, 4, 8\]"):
        kernels.decode_attention(torch.empty(3, 4, 8), case.kv, plan, torch.empty(3, 4, 8))


@pytest.mark.parametrize(
    ("q", "kv", "out"),
    [
        (torch.empty(2, 4, 8), None, torch.empty(2, 4, 9)),
        (torch.empty(2, 4, 8).half(), None, torch.empty(2, 4, 8)),
        (torch.empty(2, 4, 8), None, torch.empty(2, 4, 8).half()),
        (torch.empty(2, 4, 8), torch.empty(2, 9, 8, 2, 8), torch.empty(2, 4, 8)),
        (torch.empty(2, 4, 8), torch.empty(2, 9, 16, 2, 8).half(), torch.empty(2, 4, 8)),
        (torch.empty(2, 4, 8), torch.empty(2, 9, 2, 16, 8).transpose(2, 3), torch.empty(2, 4, 8)),
        (torch.empty(2, 4, 8), torch.empty(9, 16, 2, 8), torch.empty(2, 4, 8)),
        (torch.empty(2, 4, 8), torch.empty(3, 9, 16, 2, 8), torch.empty(2, 4, 8)),
        [torch.empty(shape, device="meta") for shape in ((2, 4, 8), (2, 9, 16, 2, 8), (2, 4, 8))],
    ],
    ids=[
        "out", "q dtype", "out dtype", "block size", "kv dtype", "kv strides", "kv dims", "kv sides",
        "device",
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_the_plan_are_rejected(case, q, kv, out):
    plan = kernels.plan_attention(case.problem, case.batch)

    with pytest.raises(ShapeError):
        kernels.decode_attention(q, case.kv if kv is None else kv, plan, out)


@pytest.mark.parametrize("queries", [[3, 1, 2], [4, 0, 4]], ids=str)
@pytest.mark.parametrize("window", [None, 6])
def test_several_queries_per_sequence_are_planned_as_a_prefill_where_no_decode_takes_them(
    queries, window
):
    asked = dataclasses.replace(problem(), max_query_tokens=4, sliding_window=window)
    case = make_case(asked, queries, [20, 0 if not queries[1] else 5, 33])

    plan = kernels.plan_attention(asked, case.batch)

    assert plan.problem.phase is Phase.PREFILL
    assert "no decode row takes 4 query tokens per sequence here" in plan.selection.why
    out = torch.empty_like(case.q)
    kernels.prefill_attention(case.q, case.kv, plan, out)
    case.check(out)


def test_a_plan_of_the_other_phase_is_rejected(case):
    plan = kernels.plan_attention(case.problem, case.batch)

    with pytest.raises(ShapeError, match="the plan is for decode, this is prefill"):
        kernels.prefill_attention(case.q, case.kv, plan, torch.empty_like(case.q))


@pytest.mark.parametrize("phase", list(Phase))
def test_a_cache_without_the_blocks_of_the_table_is_rejected(phase):
    case = make_case(problem(phase), [1, 1], [20, 5])
    plan = kernels.plan_attention(case.problem, case.batch)
    run = kernels.decode_attention if phase is Phase.DECODE else kernels.prefill_attention

    with pytest.raises(ShapeError, match="names block 5; the cache has 3 blocks"):
        run(case.q, case.kv[:, :3].contiguous(), plan, torch.empty_like(case.q))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_lens": torch.tensor([5])}, r"seq_lens is \[1\] torch.int64 .*expected \[1\] torch.i"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int32, device="meta")}, "on meta; .* on cpu"),
        ({"cu_seqlens_q": torch.tensor([0, 9, 1, 9], dtype=torch.int32)[::2]}, "not contiguous"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, r"cu_seqlens_q is \[3\]"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, r"block_table is \[2, 1\]"),
        ({"block_table": torch.zeros(1, dtype=torch.int32)}, r"block_table is \[1\]"),
        ({"block_table": torch.zeros(1, 4, dtype=torch.int32)[:, ::2]}, "not contiguous"),
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2; this decode takes at most 1 per sequence"),
        ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, "decode takes 1"),
    ],
    ids=[
        "dtype", "device", "stride", "offsets", "table", "table dims", "table stride", "max_seqlen_q",
        "two queries",
    ],
)  # fmt: skip
def test_planning_rejects_a_batch_of_wrong_shapes(fields, message):
    good = {
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "seq_lens": torch.tensor([5], dtype=torch.int32),
        "block_table": torch.zeros(1, 1, dtype=torch.int32),
        "num_tokens": 1,
        "max_seqlen_q": 1,
        "max_seqlen_k": 5,
    }

    with pytest.raises(ShapeError, match=message):
        kernels.plan_attention(problem(), PagedBatch(**(good | fields)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "slots",
    [[7], [-1], [5, -1, 0], [31, 2, 17, 16, 15], [-1, -1], [*range(40, 0, -1), -1]],
    ids=lambda slots: f"{len(slots)} from {slots[0]}",
)
def test_written_keys_and_values_are_at_their_slots_and_nothing_else_changes(dtype, index, slots):
    kv = torch.randn(2, 3, 16, 2, 8).to(dtype)
    wide = torch.randn(len(slots), 10, 8).to(dtype)
    k, v = wide[:, 4:6], wide[:, 6:8]
    expected = reference.write_kv(k, v, kv, slots)

    kernels.write_kv(k, v, kv, torch.tensor(slots, dtype=index))

    assert torch.equal(kv, expected)


def test_writing_no_tokens_changes_nothing():
    kv = torch.randn(2, 3, 16, 2, 8)
    before = kv.clone()

    kernels.write_kv(
        torch.empty(0, 2, 8), torch.empty(0, 2, 8), kv, torch.empty(0, dtype=torch.int32)
    )

    assert torch.equal(kv, before)


@pytest.mark.parametrize(
    ("k", "v", "kv", "slots"),
    [
        ((3, 2, 8), (2, 2, 8), (2, 3, 16, 2, 8), 3),
        ((3, 4, 8), (3, 4, 8), (2, 3, 16, 2, 8), 3),
        ((3, 2, 8), (3, 2, 8), (2, 3, 16, 2, 8), 4),
        ((3, 2, 8), (3, 2, 8), (3, 16, 2, 8), 3),
        ((3, 2, 8), (3, 2, 8), (3, 3, 16, 2, 8), 3),
        ((3, 1, 2, 8), (3, 1, 2, 8), (2, 3, 16, 1, 2, 8), 3),
        ((3, 2, 8), (3, 2, 8), (2, 3, 16, 2, 8), (3, 1)),
    ],
    ids=["v", "heads", "slots", "cache", "cache sides", "cache dims", "slot dims"],
)
def test_a_write_with_inconsistent_shapes_is_rejected(k, v, kv, slots):
    with pytest.raises(ShapeError, match="expected k and v"):
        kernels.write_kv(
            torch.empty(k), torch.empty(v), torch.empty(kv), torch.zeros(slots, dtype=torch.int32)
        )


def test_a_write_of_another_dtype_is_rejected():
    half = torch.empty(1, 2, 8).half()

    with pytest.raises(ShapeError, match="all of one dtype"):
        kernels.write_kv(half, half, torch.empty(2, 3, 16, 2, 8), torch.zeros(1, dtype=torch.int32))


def test_slots_that_are_not_integers_are_rejected():
    k = torch.empty(1, 2, 8)

    with pytest.raises(ShapeError, match="slot_mapping"):
        kernels.write_kv(k, k, torch.empty(2, 3, 16, 2, 8), torch.zeros(1))


def test_a_slot_mapping_that_is_not_contiguous_is_rejected():
    k, kv = torch.ones(2, 2, 8), torch.zeros(2, 3, 16, 2, 8)

    with pytest.raises(ShapeError, match="not contiguous; expected"):
        kernels.write_kv(k, k, kv, torch.arange(4, dtype=torch.int32)[::2])

    assert not bool(kv.any())


def test_keys_on_another_device_than_the_cache_are_rejected():
    k, kv = torch.ones(2, 2, 8), torch.zeros(2, 3, 16, 2, 8)

    with pytest.raises(ShapeError, match=r"on meta.* on one device"):
        kernels.write_kv(k, k.to("meta"), kv, torch.arange(2, dtype=torch.int32))


@pytest.mark.parametrize("lengths", [[20, 5], [40] * 16, [*range(20, 36)], [30, 0, 20]], ids=str)
def test_padding_rows_of_a_decode_are_not_written(lengths):
    count = len(lengths)
    case = make_case(problem(), [1] * count, lengths, layout=Layout.FRAGMENTED)
    padded = dataclasses.replace(case.batch, num_tokens=count + 7)
    plan = kernels.plan_attention(case.problem, padded)
    out = torch.full((count + 7, 4, 8), 7.0)

    kernels.decode_attention(
        torch.cat((case.q, torch.full((7, 4, 8), torch.nan))), case.kv, plan, out
    )

    case.check(out[:count])
    assert bool((out[count:] == 7.0).all())
