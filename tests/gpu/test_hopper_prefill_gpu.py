"""Hopper prefill on the GPU: edge cases of its design, in addition to the tests of all rows.

The tests cover work items without keys, fewer and many more items than SMs, work counters reused by the next
launch, tile boundaries, and every number of stages and consumers.

About 50 compilations, 3 seconds each with a cold cache.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.attention.launch import LaunchConfig, TunedLaunch
from kernels.attention.problem import Phase
from kernels.attention.registry import REGISTRY
from tests.gpu.attention_cases import (
    DEVICE,
    LONG_PAIRS,
    SHORT_PAIRS,
    around_block_boundaries,
    attend,
    judge,
    make,
    make_problem,
    named,
)

ROW = next(row for row in REGISTRY if row.name == "hopper_prefill")
# dtype, query heads, key-value heads, head dim, block size, features.
COMBINATIONS = [
    ("bfloat16", 8, 8, 64, 16, {}),
    ("bfloat16", 8, 4, 64, 32, {"sliding_window": 37, "lse": True}),
    ("float16", 8, 2, 64, 128, {"softcap": 15.0, "sliding_window": 300}),
    ("bfloat16", 16, 1, 64, 64, {"causal": False, "lse": True}),
    ("float16", 64, 1, 64, 256, {}),
    ("bfloat16", 4, 4, 128, 64, {"lse": True}),
    ("float16", 8, 4, 128, 16, {"sliding_window": 1, "lse": True}),
    ("bfloat16", 8, 1, 128, 128, {"softcap": 15.0, "softmax_scale": 0.3}),
    ("bfloat16", 32, 1, 128, 16, {"causal": False, "sliding_window": 100}),
    ("bfloat16", 14, 2, 128, 16, {"sliding_window": 200}),
    ("bfloat16", 2, 2, 256, 16, {"sliding_window": 65}),
    ("float16", 8, 4, 256, 32, {"causal": False, "softcap": 15.0, "lse": True}),
    ("bfloat16", 16, 4, 256, 256, {"lse": True}),
    # Groups that are no power of two, and head dims that are padded.
    ("bfloat16", 6, 2, 64, 16, {"lse": True}),
    ("bfloat16", 24, 8, 128, 16, {}),
    ("float16", 12, 2, 128, 64, {"sliding_window": 100}),
    ("bfloat16", 5, 1, 64, 128, {"causal": False}),
    ("bfloat16", 26, 2, 64, 16, {}),
    ("bfloat16", 8, 2, 32, 16, {"lse": True}),
    ("bfloat16", 12, 4, 48, 16, {"sliding_window": 37}),
    ("bfloat16", 6, 2, 80, 16, {"sliding_window": 37, "lse": True}),
    ("float16", 8, 2, 96, 64, {"softcap": 15.0, "lse": True}),
    ("bfloat16", 4, 4, 112, 256, {}),
    ("bfloat16", 8, 2, 160, 16, {"causal": False}),
    ("float16", 7, 1, 192, 32, {}),
    ("bfloat16", 3, 1, 240, 16, {"lse": True}),
]
PACKED_COMBINATIONS = [
    ("bfloat16", 8, 2, 64, None, {"lse": True}),
    ("float16", 8, 8, 64, None, {"causal": False, "sliding_window": 65}),
    ("bfloat16", 8, 4, 128, None, {"causal": False, "lse": True}),
    ("bfloat16", 8, 1, 128, None, {"softcap": 15.0, "sliding_window": 129}),
    ("float16", 16, 4, 256, None, {"lse": True}),
    ("bfloat16", 9, 3, 64, None, {"lse": True}),
    ("bfloat16", 6, 2, 80, None, {"sliding_window": 65}),
    ("float16", 8, 1, 96, None, {"causal": False}),
    ("bfloat16", 10, 2, 192, None, {}),
]
LAUNCHES = {
    64: [(128, 64, 2), (128, 128, 4), (192, 64, 6), (192, 128, 2), (192, 128, 3)],
    128: [(128, 64, 2), (128, 64, 4), (128, 128, 2), (192, 64, 2)],
    256: [(128, 32, 2), (128, 64, 2)],
}
HEAD_DIMS = tuple(LAUNCHES)


def selection_for(problem, launch=None):
    """Select the row, with `launch` if given; skip on GPUs other than sm_90."""
    arch = kernels.detect(DEVICE)
    if arch.sm != 90:
        pytest.skip(f"needs sm_90, this is sm_{arch.sm}")
    selection = kernels.select(problem, arch, registry=(ROW,))
    if launch is not None:
        block_m, block_n, stages = launch
        config = LaunchConfig(block_m, block_n, 4, stages)
        tuned = TunedLaunch(config, None, "for the test", measured=False)
        selection = dataclasses.replace(selection, launches=(tuned,))
    return selection


def check(combination, query_lens, seq_lens, launch=None):
    problem = make_problem(Phase.PREFILL, combination)
    selection = selection_for(problem, launch)
    case = make(problem, list(query_lens), list(seq_lens))
    judge(case, *case.attend(selection))


@pytest.mark.parametrize("combination", named([*COMBINATIONS, *PACKED_COMBINATIONS]))
def test_it_agrees_over_ragged_queries_and_keys(combination):
    check(combination, *zip(*SHORT_PAIRS, strict=True))


@pytest.mark.parametrize(
    "combination",
    named([*(COMBINATIONS[i] for i in (1, 5, 9, 12)), *PACKED_COMBINATIONS[:1]]),
)
def test_it_agrees_over_long_and_short_sequences(combination):
    check(combination, *zip(*LONG_PAIRS, strict=True))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 4])
def test_it_agrees_around_block_and_tile_boundaries(head_dim, group):
    lengths = [*around_block_boundaries(16), 191, 192, 193, 383, 384, 385]
    check(("bfloat16", 4 * group, 4, head_dim, 16, {}), lengths, lengths)


@pytest.mark.parametrize(
    ("head_dim", "launch"), [(dim, launch) for dim, tiles in LAUNCHES.items() for launch in tiles]
)
@pytest.mark.parametrize("features", [{}, {"sliding_window": 200, "lse": True}], ids=str)
def test_every_tile_and_number_of_stages_agrees(head_dim, launch, features):
    queries, keys = zip(*SHORT_PAIRS, (700, 2100), strict=True)
    check(("bfloat16", 8, 2, head_dim, 16, features), queries, keys, launch)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_seqs", [3, 400], ids=["fewer than SMs", "more than SMs"])
def test_sequences_without_keys_give_zeros_and_do_not_affect_others(head_dim, num_seqs):
    problem = make_problem(Phase.PREFILL, ("bfloat16", 8, 2, head_dim, 16, {"lse": True}))
    keys = [0 if index % 3 == 1 else 40 + (61 * index) % 700 for index in range(num_seqs)]
    queries = [1 + (13 * index) % 37 for index in range(num_seqs)]
    case = make(problem, queries, keys)
    out, lse = case.attend(selection_for(problem))

    judge(case, out, lse)
    empty = torch.cat(
        [torch.full((q,), k == 0, device=DEVICE) for q, k in zip(queries, keys, strict=True)]
    )
    assert not bool(out[empty].any())
    assert bool((lse[empty] == float("-inf")).all())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_batch_without_keys_gives_zeros(head_dim):
    problem = make_problem(Phase.PREFILL, ("bfloat16", 8, 2, head_dim, 16, {"lse": True}))
    case = make(problem, [70, 1, 300], [0, 0, 0])
    out, lse = case.attend(selection_for(problem))

    assert not bool(out.any())
    assert bool((lse == float("-inf")).all())


@pytest.mark.parametrize("query_lens", [[1], [64], [33] * 131, [33] * 133, [20] * 1000], ids=len)
def test_it_agrees_with_fewer_and_more_work_items_than_sms(query_lens):
    keys = [length + 50 * (index % 5) for index, length in enumerate(query_lens)]
    check(("bfloat16", 4, 1, 128, 16, {}), query_lens, keys)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_chunk_attends_to_earlier_tokens_of_its_sequence(head_dim):
    check(
        ("bfloat16", 8, 2, head_dim, 16, {"lse": True}),
        [512, 1, 256, 257, 100],
        [8192, 16, 4000, 300, 777],
    )


def test_one_plan_can_be_used_for_several_layers():
    problem = make_problem(Phase.PREFILL, ("bfloat16", 8, 2, 128, 16, {}))
    case = make(problem, [100, 1, 700], [100, 500, 1000])
    layers = [
        dataclasses.replace(case, q=case.q.roll(index, 0), kv=case.kv * (1.0 - index))
        for index in range(6)
    ]
    plan = kernels.plan_attention(problem, case.batch, selection=selection_for(problem))
    outs = [torch.full_like(case.q, float("nan")) for _ in layers]

    for layer, out in zip(layers, outs, strict=True):
        kernels.prefill_attention(layer.q, layer.kv, plan, out)

    for layer, out in zip(layers, outs, strict=True):
        judge(layer, out)


def test_alternating_plans_do_not_affect_each_other():
    many = make_problem(Phase.PREFILL, ("bfloat16", 8, 2, 128, 16, {}))
    cases = [make(many, [900, 30], [2000, 30]), make(many, [20] * 300, [90] * 300, seed=1)]
    plans = [
        kernels.plan_attention(many, case.batch, selection=selection_for(many)) for case in cases
    ]
    expected = [case.attend(selection_for(many))[0] for case in cases]
    for _ in range(20):
        for case, plan, wanted in zip(cases, plans, expected, strict=True):
            out = torch.full_like(case.q, float("nan"))
            kernels.prefill_attention(case.q, case.kv, plan, out)

            assert torch.equal(out, wanted)
    judge(cases[0], expected[0])
    judge(cases[1], expected[1])


def test_a_replayed_prefill_reads_changed_lengths():
    problem = make_problem(Phase.PREFILL, ("bfloat16", 8, 2, 128, 16, {}))
    selection = selection_for(problem)
    case = make(problem, [300, 40, 60], [1000, 40, 900])
    out = torch.full_like(case.q, float("nan"))
    attend(problem, case.batch, case.q, case.kv, selection)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = kernels.plan_attention(problem, case.batch, selection=selection)
        kernels.prefill_attention(case.q, case.kv, plan, out)
    for starts, lengths in (
        ([0, 300, 340, 400], [1000, 40, 900]),
        ([0, 1, 30, 400], [3, 29, 900]),
        ([0, 100, 100, 150], [700, 0, 0]),
        ([0, 300, 340, 400], [1000, 40, 900]),
    ):
        case.batch.cu_seqlens_q.copy_(torch.tensor(starts, dtype=torch.int32))
        case.batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(7.0)
        graph.replay()

        eager = torch.full_like(out, 7.0)
        assert torch.equal(out, attend(problem, case.batch, case.q, case.kv, selection, eager))
        assert bool((out[starts[-1] :] == 7.0).all())


@pytest.mark.parametrize("head_dim", [96, 128])
@pytest.mark.parametrize("features", [{}, {"sliding_window": 100}], ids=str)
def test_packed_keys_and_values_may_be_slices_of_a_wider_tensor(features, head_dim):
    problem = make_problem(Phase.PREFILL, ("bfloat16", 8, 2, head_dim, None, features))
    case = make(problem, [100, 30, 300], [500, 30, 300])
    # As in the output of one projection: a token's values follow its keys, between other heads.
    wide = torch.full((830, 6, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    kv = wide.as_strided((2, 830, 2, head_dim), (2 * 128, 6 * 128, 128, 1), 128)
    kv.copy_(case.kv)

    out = attend(problem, case.batch, case.q, kv, selection_for(problem))

    judge(case, out)


def test_a_misaligned_tensor_is_refused_before_a_launch():
    problem = make_problem(Phase.PREFILL, ("bfloat16", 8, 2, 128, 16, {}))
    case = make(problem, [20], [40])
    memory = torch.zeros(case.q.numel() + 1, dtype=torch.bfloat16, device=DEVICE)
    odd = memory[1:].view(case.q.shape)
    out = torch.full_like(case.q, 7.0)

    with pytest.raises(kernels.ShapeError, match="multiples of 16 bytes"):
        attend(problem, case.batch, odd, case.kv, selection_for(problem), out)

    torch.cuda.synchronize()
    assert bool((out == 7.0).all())
