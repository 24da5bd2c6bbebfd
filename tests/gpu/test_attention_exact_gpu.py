"""Bitwise properties of the attention kernels: repeats, CUDA graphs, cache layouts, masks.

`test_batch_invariance_gpu` compares batches.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from tests.gpu.attention_cases import (
    COMBINATIONS,
    DEVICE,
    attend,
    judge,
    make,
    make_problem,
    rows,
    run,
    selection_of,
)
from tests.kernels.references.problems import UNUSED_BLOCK, Layout

PREFILL = pytest.mark.parametrize("row", rows(Phase.PREFILL))
DECODE = pytest.mark.parametrize("row", rows(Phase.DECODE))
BOTH = pytest.mark.parametrize("row", [*rows(Phase.PREFILL), *rows(Phase.DECODE)])
REPEATS = 1000
NEED_ALIGNMENT = {"hopper_decode", "hopper_keys_on_m_decode", "hopper_prefill"}
"""Rows that use bulk copies and therefore require addresses that are multiples of 16 bytes."""


def bfloat16_problem(phase, **features):
    return make_problem(phase, ("bfloat16", 8, 2, 128, 16, features))


def queries_of(phase, count, most):
    """Query lengths of `count` sequences: 1 in a decode, ragged up to `most` in a prefill."""
    if phase is Phase.DECODE:
        return [1] * count
    return [1 + (37 * index) % most for index in range(count)]


def ragged(count, most):
    return [1 + (7919 * index + 41) % most for index in range(count)]


@BOTH
def test_a_thousand_repeats_give_the_same_bits(row):
    problem = bfloat16_problem(row.phase, lse=True)
    queries = queries_of(row.phase, 60, 150)
    case = make(
        problem, queries, [max(pair) for pair in zip(queries, ragged(60, 3000), strict=True)]
    )
    plan = kernels.plan_attention(problem, case.batch, selection=selection_of(row, problem))
    call = kernels.decode_attention if row.phase is Phase.DECODE else kernels.prefill_attention
    results = []
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        out = torch.full_like(case.q, float("nan"))
        lse = torch.full(case.q.shape[:2], float("nan"), device=DEVICE)
        call(case.q, case.kv, plan, out, lse)
        results = results or [out, lse]
        # Summed on the device, so that the launches are not separated by synchronization.
        differences += (out != results[0]).sum() + (lse != results[1]).sum()

    assert int(differences) == 0


@DECODE
def test_a_thousand_repeats_of_one_long_sequence_give_the_same_bits(row):
    case = make(bfloat16_problem(Phase.DECODE), [1], [16384])
    selection = selection_of(row, case.problem)
    first = attend(case.problem, case.batch, case.q, case.kv, selection)
    plan = kernels.plan_attention(case.problem, case.batch, selection=selection)
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        out = torch.full_like(case.q, float("nan"))
        kernels.decode_attention(case.q, case.kv, plan, out)
        differences += (out != first).sum()

    assert int(differences) == 0


@BOTH
@pytest.mark.parametrize("combination", [COMBINATIONS[1], COMBINATIONS[2]], ids=["48", "16"])
def test_the_cache_layout_does_not_change_a_bit(row, combination):
    problem = make_problem(row.phase, combination)
    queries = queries_of(row.phase, 5, 150)
    outs = [
        run(row, make(problem, queries, [200, 1000, 333, 160, 149], layout=layout))[0]
        for layout in Layout
    ]

    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_attention_over_values_of_one_returns_ones(row, dtype):
    problem = make_problem(row.phase, (dtype, 8, 2, 128, 16, {}))
    queries = queries_of(row.phase, 6, 120)
    case = make(problem, queries, [1, 100, 3000, 129, 160, 800])
    case.kv[1].masked_fill_(~case.kv[1].isnan(), 1.0)
    out = run(row, case)[0]

    # Numerator and denominator sum up to 3000 terms in different orders; half precision rounds the difference away.
    slack = 1e-5 if dtype == "float32" else 0.0
    assert float((out - 1).abs().max()) <= slack


@BOTH
def test_queries_without_visible_keys_give_zeros_and_a_log_sum_exp_of_minus_infinity(row):
    problem = bfloat16_problem(row.phase, lse=True)
    if row.phase is Phase.DECODE:
        case, empty = make(problem, [1, 1, 1], [0, 300, 0]), [0, 2]
    else:
        # The causal mask is aligned to the bottom right: the first 9 of 10 queries precede the only key.
        case, empty = make(problem, [10, 5, 3], [1, 0, 3]), [*range(9), *range(10, 15)]
    out, lse = run(row, case)
    full = [index for index in range(case.q.shape[0]) if index not in empty]

    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    assert bool((lse[empty] == float("-inf")).all())
    assert bool(torch.isfinite(lse[full]).all())
    assert bool((out[full] != 0).any(-1).all())


@PREFILL
def test_queries_may_be_a_slice_of_a_wider_tensor(row):
    case = make(bfloat16_problem(Phase.PREFILL), [100, 30], [500, 30])
    wide = torch.full((130, 12, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    wide[:, :8] = case.q
    selection = selection_of(row, case.problem)
    out = torch.full_like(case.q, float("nan"))

    attend(case.problem, case.batch, wide[:, :8], case.kv, selection, out)

    assert torch.equal(out, attend(case.problem, case.batch, case.q, case.kv, selection))


@BOTH
def test_padding_rows_are_not_written(row):
    case = make(bfloat16_problem(row.phase), [1, 1], [40, 300])
    padded = dataclasses.replace(case.batch, num_tokens=8)
    q = torch.full((8, 8, 128), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    q[:2] = case.q
    out = torch.full_like(q, 7.0)
    selection = selection_of(row, case.problem)

    attend(case.problem, padded, q, case.kv, selection, out)

    assert torch.equal(out[:2], attend(case.problem, case.batch, case.q, case.kv, selection))
    assert bool((out[2:] == 7.0).all())


@BOTH
def test_misaligned_queries_are_computed_correctly_or_refused(row):
    case = make(
        bfloat16_problem(row.phase), queries_of(row.phase, 5, 90), [200, 1000, 333, 160, 149]
    )
    selection = selection_of(row, case.problem)
    # A token stride of an odd number of elements, and a base address aligned to 2 bytes only.
    tokens, width = case.q.shape[0], case.q[0].numel() + 3
    memory = torch.full((1 + tokens * width,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    odd = memory[1:].view(tokens, width)[:, :-3].view(case.q.shape)
    odd.copy_(case.q)
    out = torch.full_like(case.q, float("nan"))
    if row.name in NEED_ALIGNMENT:
        with pytest.raises(kernels.ShapeError, match="multiples of 16 bytes"):
            attend(case.problem, case.batch, odd, case.kv, selection, out)
        return

    attend(case.problem, case.batch, odd, case.kv, selection, out)

    judge(case, out)


@BOTH
@pytest.mark.parametrize("window", [1, 100, 1000])
def test_keys_before_every_window_are_never_read(row, window):
    query_lens = queries_of(row.phase, 3, 90)
    problem = bfloat16_problem(row.phase, sliding_window=window)
    case = make(problem, query_lens, [5000, 1500, 1234])
    for seq, count in enumerate(query_lens):
        gone = case.seq_lens[seq] - count - window + 1
        blocks, rest = divmod(gone, problem.block_size)
        case.kv[:, case.block_table[seq][:blocks]] = float("nan")
        case.kv[:, case.block_table[seq][blocks], :rest] = float("nan")
        case.batch.block_table[seq, :blocks] = UNUSED_BLOCK

    judge(case, *run(row, case))


@BOTH
def test_a_step_without_sequences_writes_nothing(row):
    problem = bfloat16_problem(row.phase)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kv = torch.zeros((2, 1, 16, 2, 128), dtype=torch.bfloat16, device=DEVICE)
    for tokens in (0, 3):
        batch = PagedBatch(starts, none, none.view(0, 4), tokens, 0, 0)
        q = torch.ones((tokens, 8, 128), dtype=torch.bfloat16, device=DEVICE)
        out = torch.full_like(q, 7.0)

        attend(problem, batch, q, kv, selection_of(row, problem), out)

        assert bool((out == 7.0).all())


class Captured:
    """A step captured in a CUDA graph, planned during or before the capture."""

    def __init__(self, problem: AttentionProblem, batch, q, kv, selection, *, plan_inside) -> None:
        self.out = torch.full_like(q, float("nan"))
        attend(problem, batch, q, kv, selection)  # compiles
        torch.cuda.synchronize()
        plan = None
        if not plan_inside:
            plan = kernels.plan_attention(problem, batch, selection=selection)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            if plan is None:
                plan = kernels.plan_attention(problem, batch, selection=selection)
            if problem.phase is Phase.DECODE:
                kernels.decode_attention(q, kv, plan, self.out)
            else:
                kernels.prefill_attention(q, kv, plan, self.out)
        self._plan = plan  # keeps alive the buffers that the graph uses

    def replay(self) -> torch.Tensor:
        self.out.fill_(float("nan"))
        self._graph.replay()
        return self.out


@DECODE
def test_a_replayed_decode_reads_changed_lengths_and_block_tables(row):
    problem = bfloat16_problem(Phase.DECODE)
    selection = selection_of(row, problem)
    lengths = [4096, 1, 700, 2048, 33, 0]
    case = make(problem, [1] * 6, lengths)
    graph = Captured(problem, case.batch, case.q, case.kv, selection, plan_inside=True)
    for changed in (lengths, [5, 1, 1, 2, 7, 0], [4096, 1, 64, 2000, 1, 0], [0] * 6, lengths):
        case.batch.seq_lens.copy_(torch.tensor(changed, dtype=torch.int32))
        case.q.copy_(case.q.roll(1, 0))

        replayed = graph.replay().clone()

        eager = attend(problem, case.batch, case.q, case.kv, selection)
        assert torch.equal(replayed, eager)
    order = torch.tensor([3, 1, 2, 0, 4, 5], device=DEVICE)
    case.batch.block_table.copy_(case.batch.block_table[order])
    case.batch.seq_lens.copy_(case.batch.seq_lens[order])

    assert torch.equal(graph.replay(), attend(problem, case.batch, case.q, case.kv, selection))


@BOTH
def test_a_replay_of_a_step_planned_before_the_capture_reads_changed_queries_and_keys(row):
    problem = bfloat16_problem(row.phase)
    selection = selection_of(row, problem)
    case = make(problem, queries_of(row.phase, 4, 90), [3000, 100, 500, 1000])
    graph = Captured(problem, case.batch, case.q, case.kv, selection, plan_inside=False)
    for _ in range(3):
        case.q.copy_(case.q.roll(1, 0))
        case.kv.mul_(-1.0)

        replayed = graph.replay().clone()

        assert torch.equal(replayed, attend(problem, case.batch, case.q, case.kv, selection))
