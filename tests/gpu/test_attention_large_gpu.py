"""Offsets past 2^31 elements in caches, packed keys, queries and outputs."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.attention.problem import PackedBatch, PagedBatch, Phase
from tests.gpu.attention_cases import DEVICE, attend, judge, make_problem, rows, run, selection_of
from tests.kernels.references import reference
from tests.kernels.references.problems import UNUSED_BLOCK, PackedCase, PagedCase

KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
PAST = 2**31 // (KV_HEADS * HEAD_DIM) + 4096
"""Number of tokens whose keys extend past 2^31 elements."""


def offsets(lengths):
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def big_cache():
    """Return a cache of NaN, [2, N, S, K, D], whose last blocks lie past 2^31 elements of keys."""
    shape = (2, PAST // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)


def big_paged_case(phase, query_lens, seq_lens):
    """Return a case whose blocks lie at the end of the cache, at its start and in between."""
    problem = make_problem(phase, ("bfloat16", 32, KV_HEADS, HEAD_DIM, BLOCK_SIZE, {}))
    kv = big_cache()
    last = kv.shape[1] - 1
    needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
    tables, next_block = [], 0
    for count in needed:
        ids = range(next_block, next_block + count)
        tables.append([last - block if block % 3 else block * 500 for block in ids])
        next_block += count
    generator = torch.Generator(DEVICE).manual_seed(0)
    for table, length in zip(tables, seq_lens, strict=True):
        for index, block in enumerate(table):
            kv[:, block, : length - index * BLOCK_SIZE].normal_(generator=generator)
    width = max(needed)
    padded = [table + [UNUSED_BLOCK] * (width - len(table)) for table in tables]
    starts = [sum(query_lens[:index]) for index in range(len(query_lens) + 1)]
    batch = PagedBatch(
        offsets(starts), offsets(seq_lens), offsets(padded), sum(query_lens), max(query_lens),
        max(seq_lens),
    )  # fmt: skip
    q = torch.randn(
        (sum(query_lens), 32, HEAD_DIM), generator=generator, dtype=torch.bfloat16, device=DEVICE
    )
    return PagedCase(problem, batch, q, kv, query_lens, seq_lens, tables)


@pytest.mark.gpu_memory(12)
@pytest.mark.parametrize("row", [*rows(Phase.PREFILL), *rows(Phase.DECODE)])
def test_blocks_past_two_to_the_31_elements_are_read(row):
    queries = [1, 1, 1] if row.phase is Phase.DECODE else [200, 1, 37]
    case = big_paged_case(row.phase, queries, [1000, 17, 333])

    judge(case, *run(row, case))


@pytest.mark.gpu_memory(12)
def test_slots_past_two_to_the_31_elements_are_written():
    kv = big_cache()
    k = torch.randn((4, KV_HEADS, HEAD_DIM), device=DEVICE).bfloat16()
    v = torch.randn((4, KV_HEADS, HEAD_DIM), device=DEVICE).bfloat16()
    last = kv.shape[1] * BLOCK_SIZE - 1
    slots = [last, 0, 2**31 // (KV_HEADS * HEAD_DIM), last - 1]

    kernels.write_kv(k, v, kv, offsets(slots))

    flat = kv.view(2, -1, KV_HEADS, HEAD_DIM)
    assert torch.equal(flat[0, slots], k)
    assert torch.equal(flat[1, slots], v)
    written = torch.tensor([not bool(slot.isnan().any()) for slot in flat[0, last - 4 :]])
    assert written.tolist() == [False, False, False, True, True]


@pytest.mark.gpu_memory(12)
@pytest.mark.parametrize("row", rows(Phase.PREFILL))
def test_packed_keys_past_two_to_the_31_elements_are_read(row):
    problem = make_problem(Phase.PREFILL, ("bfloat16", 32, KV_HEADS, HEAD_DIM, None, {}))
    shape = (2, PAST, KV_HEADS, HEAD_DIM)
    kv = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
    kv[:, -300:].normal_()
    # The first sequence has no queries; its keys fill the first 2^31 elements.
    lengths = [PAST - 300, 300]
    batch = PackedBatch(offsets([0, 0, 40]), offsets([0, PAST - 300, PAST]), 40, 40, PAST - 300)
    q = torch.randn((40, 32, HEAD_DIM), device=DEVICE).bfloat16()
    out = attend(problem, batch, q, kv, selection_of(row, problem))
    near = PackedBatch(offsets([0, 40]), offsets([0, 300]), 40, 40, 300)

    judge(PackedCase(problem, near, q, kv[:, -300:], [40], lengths[1:]), out)


@pytest.mark.gpu_memory(18)
@pytest.mark.parametrize("row", rows(Phase.PREFILL))
def test_queries_and_outputs_past_two_to_the_31_elements_are_read_and_written(row):
    problem = make_problem(Phase.PREFILL, ("bfloat16", 32, KV_HEADS, HEAD_DIM, None, {}))
    tokens = 2**31 // (32 * HEAD_DIM) + 1000
    q = torch.full((tokens, 32, HEAD_DIM), 0.5, dtype=torch.bfloat16, device=DEVICE)
    q[-100:].normal_()
    kv = torch.randn((2, 150, KV_HEADS, HEAD_DIM), device=DEVICE).bfloat16()
    # The first sequence has no keys, so its queries are only written as zeros.
    starts = offsets([0, tokens - 100, tokens])
    batch = PackedBatch(starts, offsets([0, 0, 150]), tokens, tokens - 100, 150)

    out = attend(problem, batch, q, kv, selection_of(row, problem))

    exact, same = (
        reference.attention(
            q[-100:], kv[0], kv[1], softmax_scale=problem.softmax_scale, dtype=dtype
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    error, plain = ((result - exact).abs().max() for result in (out[-100:], same))
    assert float(error) <= 2 * float(plain) + 1e-5
    assert not bool(out[: tokens - 100].any())
