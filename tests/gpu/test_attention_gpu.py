"""Attention kernels on the GPU against the reference; unused cache memory contains NaN.

The files of this folder compile about 65 kernels, 1 to 4 seconds each with a cold cache.
"""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.attention.problem import Phase
from kernels.attention.registry import REGISTRY
from tests.gpu.attention_cases import (
    COMBINATIONS,
    DEVICE,
    LONG_COMBINATIONS,
    LONG_LENGTHS,
    LONG_PAIRS,
    NON_CAUSAL_COMBINATIONS,
    PACKED_COMBINATIONS,
    RAGGED_LENGTHS,
    SEVERAL_QUERIES_COMBINATIONS,
    SHORT_PAIRS,
    around_block_boundaries,
    every_launch,
    judge,
    make,
    make_problem,
    named,
    rows,
    run,
    selection_of,
)
from tests.kernels.references import reference

PREFILL = pytest.mark.parametrize("row", rows(Phase.PREFILL))
DECODE = pytest.mark.parametrize("row", rows(Phase.DECODE))


def split_pairs(pairs):
    queries, keys = zip(*pairs, strict=True)
    return list(queries), list(keys)


@PREFILL
@pytest.mark.parametrize("combination", named([*COMBINATIONS, *NON_CAUSAL_COMBINATIONS]))
def test_prefill_agrees_over_ragged_queries_and_keys(row, combination):
    case = make(make_problem(Phase.PREFILL, combination), *split_pairs(SHORT_PAIRS))

    judge(case, *run(row, case))


@PREFILL
@pytest.mark.parametrize("combination", named(LONG_COMBINATIONS))
def test_prefill_agrees_over_long_sequences(row, combination):
    case = make(make_problem(Phase.PREFILL, combination), *split_pairs(LONG_PAIRS))

    judge(case, *run(row, case))


@PREFILL
@pytest.mark.parametrize("combination", named(PACKED_COMBINATIONS))
def test_prefill_agrees_over_packed_keys_and_values(row, combination):
    case = make(make_problem(Phase.PREFILL, combination), *split_pairs(SHORT_PAIRS))

    judge(case, *run(row, case))


@PREFILL
@pytest.mark.parametrize("combination", named([COMBINATIONS[1], COMBINATIONS[2]]))
def test_prefill_agrees_around_block_and_tile_boundaries(row, combination):
    lengths = around_block_boundaries(combination[4])
    case = make(make_problem(Phase.PREFILL, combination), lengths, lengths)

    judge(case, *run(row, case))


@PREFILL
def test_prefill_of_a_chunk_agrees_with_earlier_tokens_in_the_cache(row):
    problem = make_problem(Phase.PREFILL, COMBINATIONS[2])
    case = make(problem, [1, 16, 100, 128, 256, 257], [1000, 16, 777, 2048, 4000, 300])

    judge(case, *run(row, case))


@DECODE
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_decode_agrees_around_block_and_tile_boundaries(row, combination):
    lengths = [0, *around_block_boundaries(combination[4]), 500, 1000]
    case = make(make_problem(Phase.DECODE, combination), [1] * len(lengths), lengths)

    judge(case, *run(row, case))


@DECODE
@pytest.mark.parametrize("combination", named(LONG_COMBINATIONS))
def test_decode_agrees_for_a_batch_of_long_and_short_sequences(row, combination):
    problem = make_problem(Phase.DECODE, combination)
    case = make(problem, [1] * len(LONG_LENGTHS), LONG_LENGTHS)

    judge(case, *run(row, case))


@DECODE
@pytest.mark.parametrize("length", [1, 63, 1025, 16384, 32767])
def test_decode_agrees_for_a_single_sequence(row, length):
    case = make(make_problem(Phase.DECODE, COMBINATIONS[2]), [1], [length])

    judge(case, *run(row, case))


@DECODE
def test_decode_agrees_for_a_large_ragged_batch(row):
    lengths = [1 + (index * 7919) % 1500 for index in range(256)]
    case = make(make_problem(Phase.DECODE, COMBINATIONS[0]), [1] * 256, lengths)

    judge(case, *run(row, case))


@DECODE
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [16, 24])
def test_every_tuned_decode_launch_agrees(row, heads, head_dim):
    problem = make_problem(Phase.DECODE, ("bfloat16", heads, 8, head_dim, 16, {}))
    case = make(problem, [1] * len(RAGGED_LENGTHS), RAGGED_LENGTHS)

    for selection in every_launch(selection_of(row, problem)):
        judge(case, *case.attend(selection))


@DECODE
@pytest.mark.parametrize("combination", named(SEVERAL_QUERIES_COMBINATIONS))
def test_decode_agrees_with_several_queries_per_sequence(row, combination):
    most = combination[5]["max_query_tokens"]
    queries = [most, 1, 2, most, most - 1, 1, most, most]
    case = make(
        make_problem(Phase.DECODE, combination), queries, [most, 1, 2, 100, 513, 16, 4097, 2048]
    )

    judge(case, *run(row, case))


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("combination", named([COMBINATIONS[0], COMBINATIONS[1], COMBINATIONS[13]]))
def test_the_pytorch_rows_agree_on_a_gpu(phase, combination):
    row = next(row for row in REGISTRY if row.phase is phase and row.cpu)
    queries = [1] * 5 if phase is Phase.DECODE else [1, 16, 100, 30, 257]
    case = make(make_problem(phase, combination), queries, [1, 40, 100, 700, 1025])

    judge(case, *run(row, case))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "block_size"),
    [
        (torch.bfloat16, 8, 128, 16),
        (torch.float16, 3, 80, 48),
        (torch.float32, 1, 256, 64),
        (torch.bfloat16, 2, 96, 256),
    ],
)
def test_write_kv_writes_its_slots_and_nothing_else(
    dtype, heads, head_dim, block_size, index_dtype
):
    tokens, blocks = 300, 40
    generator = torch.Generator(DEVICE).manual_seed(0)
    kv = torch.full((2, blocks, block_size, heads, head_dim), 7.0, dtype=dtype, device=DEVICE)
    # As in the model, keys and values are slices of one projection.
    fused = torch.randn(
        (tokens, 3 * heads, head_dim), generator=generator, dtype=dtype, device=DEVICE
    )
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    slots = torch.randperm(blocks * block_size, generator=generator, device=DEVICE)[:tokens]
    slots[::7] = -1
    expected = reference.write_kv(k, v, kv, slots.tolist())

    kernels.write_kv(k, v, kv, slots.to(index_dtype))

    assert torch.equal(kv, expected)
