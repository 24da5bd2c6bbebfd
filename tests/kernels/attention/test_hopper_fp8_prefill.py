"""Prefill over an FP8 cache on Hopper without a GPU: selection, conversion of the cache, and the error of rounding."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from kernels.attention.registry import REGISTRY
from kernels.attention.splits import split_sequences
from kernels.fp8 import FP8
from kernels.hadamard import hadamard_transform
from tests.kernels.references import reference, reference_fp8
from tests.kernels.references.problems import Layout, make_case
from tests.kernels.triton_interpreter import interpreted

ROW, UNPACKED = (
    next(row for row in REGISTRY if row.name == name)
    for name in ("hopper_fp8_prefill", "hopper_unpacked_prefill")
)
H100 = CATALOGUE["h100"]
TILE = 128
# Of every 16 keys, a thread holds the scores of these four; as an FP8 operand it holds four adjacent slots.
KEYS_IN_SLOTS = [
    sixteen + key
    for sixteen in range(0, TILE, 16)
    for thread in range(4)
    for key in (2 * thread, 2 * thread + 1, 2 * thread + 8, 2 * thread + 9)
]
LARGEST = 448.0


def problem(phase=Phase.PREFILL, **more):
    fields = {"dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    fields |= {"block_size": 16, "softmax_scale": 0.1, "kv_dtype": FP8}
    return AttentionProblem(phase, **(fields | more))


@pytest.mark.parametrize("arch", ["h100", "h200"])
@pytest.mark.parametrize(
    "more",
    [
        {}, {"dtype": "float16"}, {"causal": False}, {"lse": True}, {"block_size": 48},
        {"num_heads": 8}, {"num_heads": 64, "num_kv_heads": 1},
    ],
    ids=str,
)  # fmt: skip
def test_over_an_fp8_cache_hopper_multiplies_in_fp8(arch, more):
    selection = kernels.select(problem(**more), CATALOGUE[arch])

    assert selection.spec is ROW
    assert "multiplies in FP8" in selection.why


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"head_dim": 64}, "head_dim 64 is not one of [128]"),
        ({"head_dim": 256}, "head_dim 256 is not one of [128]"),
        ({"num_heads": 24}, "no groups of 3 query heads"),
        ({"sliding_window": 100}, "no sliding window"),
        ({"softcap": 15.0}, "no softcap"),
    ],
    ids=str,
)
def test_what_it_does_not_support_is_converted_for_the_other_kernel_with_its_tiles(more, reason):
    selection = kernels.select(problem(**more), H100)

    assert selection.spec is UNPACKED
    assert any(told.startswith(reason) for told in dict(selection.refusals)[ROW.name])
    plain = kernels.select(problem(**more, kv_dtype=None), H100)
    assert plain.spec.name == "hopper_prefill"
    assert [it.launch for it in selection.launches] == [it.launch for it in plain.launches]


@pytest.mark.parametrize("row", [ROW, UNPACKED], ids=lambda row: row.name)
@pytest.mark.parametrize("more", [{}, {"block_size": None}], ids=str)
def test_neither_row_takes_keys_that_are_not_quantized(row, more):
    selection = kernels.select(problem(kv_dtype=None, **more), H100)

    assert selection.spec.name == "hopper_prefill"
    assert "reads quantized caches only" in row.unsupported(problem(kv_dtype=None, **more), H100)


@pytest.mark.parametrize("arch", ["l4", "a100", "b200", "cpu"])
def test_other_processors_have_their_own_rows(arch):
    assert not kernels.select(problem(), CATALOGUE[arch]).spec.name.startswith("hopper")


def outliers(generator, *shape):
    """Return normal numbers, of which one in a thousand is ten times as large, as in trained models."""
    x = torch.randn(*shape, generator=generator)
    rare = torch.rand(*shape, generator=generator) < 0.001
    return x + 10 * torch.randn(*shape, generator=generator) * rare


QUERIES, KEYS = [70, 0, 5, 60, 1], [300, 0, 5, 128, 77]


def cached(**more):
    """Return a case over an FP8 cache whose blocks are in no order."""
    return make_case(problem(**more), QUERIES, KEYS, layout=Layout.FRAGMENTED)


def rows_of(case, seq):
    """Return the numbers of a sequence's keys and values, [2, n, K, D], and their scales, [2, n, K]."""
    blocks, length = case.block_table[seq], case.seq_lens[seq]
    numbers = case.kv[:, blocks].flatten(1, 2)[:, :length]
    return numbers, case.kv_scale[:, blocks].transpose(2, 3).flatten(1, 2)[:, :length]


@interpreted
@pytest.mark.parametrize(
    ("keys", "kernel"), [(8191, "UnpackedPrefill"), (8192, "HopperFP8Prefill")]
)
def test_short_sequences_are_converted(keys, kernel):
    lengths = torch.tensor([keys, 3], dtype=torch.int32)
    offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
    table = torch.zeros((2, 512), dtype=torch.int32)
    batch = PagedBatch(offsets, lengths, table, 2, 1, keys)

    plan = kernels.plan_attention(problem(), batch, H100)

    assert plan.selection.spec is (UNPACKED if keys < 8192 else ROW)
    assert type(plan.run).__name__ == kernel


@interpreted
@pytest.mark.parametrize(
    ("seqs", "keys", "head_dim", "kernel"),
    [
        (32, 1024, 128, "UnpackedPrefill"),
        (8, 40960, 128, "HopperFP8Prefill"),
        (32, 40960, 128, "PortablePrefill"),
        (256, 1024, 64, "UnpackedPrefill"),
        (32, 40960, 64, "PortablePrefill"),
        (32, 40960, 112, "UnpackedPrefill"),  # the portable kernel does not support it
    ],
)
def test_many_sequences_of_any_length_are_read_by_the_portable_kernel(seqs, keys, head_dim, kernel):
    offsets = torch.arange(seqs + 1, dtype=torch.int32)
    lengths = torch.zeros(seqs, dtype=torch.int32)
    table = torch.zeros((seqs, keys // 16), dtype=torch.int32)
    batch = PagedBatch(offsets, lengths, table, seqs, 1, keys)

    plan = kernels.plan_attention(problem(head_dim=head_dim), batch, H100)

    assert type(plan.run).__name__ == kernel


@interpreted
@pytest.mark.parametrize("more", [{}, {"block_size": 48, "dtype": "float16"}], ids=str)
def test_tiles_have_the_largest_scale_of_their_rows_and_the_same_values(more):
    from kernels.attention.hopper.fp8 import tiles as fp8_tiles

    case = cached(num_heads=4, num_kv_heads=2, **more)
    case.kv_scale[:, case.block_table[0][0], :, 0] = 2.0**-40
    plan = fp8_tiles.plan_key_tiles(case.batch, TILE)
    operands = fp8_tiles.make_operands(case.q, 2, len(plan.tiles), TILE)

    fp8_tiles.write_tiles(case.kv, case.kv_scale, case.batch, plan, operands)

    assert plan.first_tiles.tolist() == [0, 3, 3, 4, 5]
    assert (plan.tiles[:, 2] > 0).sum() == 6
    for seq, length in enumerate(KEYS):
        if not length:
            continue
        numbers, scale = rows_of(case, seq)
        values = torch.zeros(2, -(-length // TILE) * TILE, 2, 128)
        values[:, :length] = reference.dequantize(numbers, scale)
        for index, tile in enumerate(values.split(TILE, 1)):
            at = int(plan.first_tiles[seq]) + index
            largest = scale[:, index * TILE : (index + 1) * TILE].amax(1)
            assert torch.equal(operands.scales[:2, :, at], largest)
            assert torch.equal(operands.scales[2, :, at], 1 / largest[1])
            for head in range(2):
                keys = operands.k[head, at].float() * largest[0, head]
                of_slots = operands.v[head, at].float().T * largest[1, head]
                # Only numbers of e4m3 that become subnormal are rounded.
                torch.testing.assert_close(
                    keys, tile[0, :, head], rtol=0, atol=float(2.0**-10 * largest[0, head])
                )
                torch.testing.assert_close(
                    of_slots, tile[1, KEYS_IN_SLOTS, head], rtol=0, atol=float(2.0**-10 * largest[1, head])
                )  # fmt: skip
                large = tile[0, :, head].abs() >= 2.0**-6 * largest[0, head]
                assert torch.equal(keys[large], tile[0, :, head][large])


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_are_quantized_as_in_pytorch(dtype):
    from kernels.attention.hopper.fp8 import tiles as fp8_tiles

    q = outliers(torch.Generator().manual_seed(1), 90, 6, 128).to(dtype)
    q[3, 2] = 0
    operands = fp8_tiles.make_operands(q, 1, 1, TILE)

    fp8_tiles.write_queries(q, operands, 1.5)

    largest = q.double().abs().amax(-1)
    expected = reference_fp8.to_e4m3(
        q.double() * (LARGEST / largest.clamp(min=1e-12))[..., None]
    ).float()
    unequal = expected != operands.q.float()
    assert unequal.float().mean() < 1e-3
    assert bool(((operands.q.float() - expected).abs() <= expected.abs() / 8 + 2**-9).all())
    kept = largest > 0
    torch.testing.assert_close(
        operands.factors.double()[kept], (largest / LARGEST * 1.5)[kept], rtol=1e-5, atol=0
    )
    assert bool(operands.factors.isfinite().all())


@interpreted
@pytest.mark.parametrize(
    "more", [{}, {"head_dim": 80, "dtype": "float16"}, {"sliding_window": 33, "block_size": 5}], ids=str
)  # fmt: skip
def test_a_cache_is_converted_to_rows_one_sequence_after_the_other(more):
    from kernels.attention.hopper.fp8 import cached_rows

    case = cached(num_heads=2, num_kv_heads=2, **more)
    starts = torch.tensor([0, *torch.tensor(KEYS).cumsum(0)], dtype=torch.int32)
    shape = (2, sum(KEYS), 2, case.problem.head_dim)
    found = torch.full(shape, 7.0, dtype=case.q.dtype)

    cached_rows.convert_rows(case.problem, case.batch, starts, case.kv, case.kv_scale, found)

    for seq, length in enumerate(KEYS):
        rows = found[:, int(starts[seq]) : int(starts[seq]) + length]
        expected = reference.dequantize(*rows_of(case, seq)).to(rows.dtype)
        kept = max(0, length - QUERIES[seq] - (case.problem.sliding_window or 1000) + 1)
        assert torch.equal(rows[:, kept:], expected[:, kept:])
        assert bool((rows[:, :kept] == 7.0).all())


def test_a_batch_is_split_so_that_converted_keys_fit_or_are_of_one_sequence():
    lengths = torch.arange(10, dtype=torch.int32)
    offsets = torch.arange(11, dtype=torch.int32)
    batch = PagedBatch(offsets, lengths, lengths[:, None], 10, 1, 1 << 14)

    (whole,) = split_sequences(problem(num_kv_heads=2), batch, 1)
    parts = split_sequences(problem(), batch, 1)
    alone = split_sequences(problem(), dataclasses.replace(batch, max_seqlen_k=1 << 17), 2)

    assert whole.num_seqs == 10
    assert [part.seq_lens.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [part.cu_seqlens_q.tolist() for part in parts][1:] == [[4, 5, 6, 7, 8], [8, 9, 10]]
    assert parts[2].block_table.tolist() == [[8], [9]]
    assert len(alone) == 10


def rmse(found, truth):
    return float((found.double() - truth).square().mean().sqrt())


def cache_rows(x):
    """Return rotated rows as a cache has them."""
    return reference.quantize_kv(x.float())


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_of_the_algorithm_differs_from_attention_only_by_rounding(causal):
    """Weights and operands in e4m3 each have a relative error of at most 1/16; the result has a few times that."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 64, generator=generator) for n, h in ((90, 4), (300, 2), (300, 2)))
    options = {"softmax_scale": 0.125, "causal": causal}

    keys, values = cache_rows(hadamard_transform(k)), cache_rows(v)
    out, lse = reference_fp8.tile_scaled(hadamard_transform(q), keys, values, **options)
    plain = reference_fp8.per_tensor(q, k, v, **options)

    truth = reference.attention(q, k, v, dtype=torch.float64, **options)
    sums = reference.log_sum_exp(q, k, dtype=torch.float64, **options)
    size = float(truth.square().mean().sqrt())
    assert rmse(out, truth) < 0.1 * size
    assert rmse(plain, truth) < 0.1 * size
    torch.testing.assert_close(lse, sums, rtol=0, atol=0.1)


def test_queries_that_see_no_key_are_zero_in_the_references():
    q, kv = torch.randn(5, 2, 64), torch.randn(2, 3, 1, 64)

    out, lse = reference_fp8.tile_scaled(q, *map(cache_rows, kv), softmax_scale=0.125)
    plain = reference_fp8.per_tensor(q, *kv, softmax_scale=0.125)

    assert not bool(out[:2].any() or plain[:2].any())
    assert bool((lse[:2] == float("-inf")).all())
    assert bool(lse[2:].isfinite().all())


@pytest.mark.slow
def test_over_16384_keys_with_outliers_it_is_2_5_times_as_exact_as_one_scale_per_tensor():
    """1024 queries of a head over all keys, three seeds together. At 4096 keys the ratio is only about 1.8."""
    options = {"softmax_scale": 128**-0.5, "causal": False}
    squares = {"plain": 0.0, "tiles": 0.0}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (outliers(generator, n, 1, 128).bfloat16() for n in (1024, 16384, 16384))
        truth = reference.attention(q, k, v, dtype=torch.float64, **options)
        rounded = options | {"dtype": torch.float32}
        squares["plain"] += rmse(reference_fp8.per_tensor(q, k, v, **rounded), truth) ** 2
        keys, values = cache_rows(hadamard_transform(k)), cache_rows(v)
        tiles, _ = reference_fp8.tile_scaled(hadamard_transform(q), keys, values, **rounded)
        squares["tiles"] += rmse(tiles, truth) ** 2

    assert math.sqrt(squares["plain"] / squares["tiles"]) >= 2.5


def test_the_units_of_a_score_are_those_of_the_largest_term_of_each_instruction():
    """Of 64 elements, the first 32 products sum to 33 or 0; the others add 8."""
    q, k = torch.ones(2, 64), torch.zeros(1, 64)
    k[0, :32], k[0, 0], k[0, 32:] = 1.0, 2.0, 0.25
    q[1, :32] = 0.0

    units = reference_fp8.score_units(q, k)

    assert units.tolist() == [[(32 + 32) * 2.0**-13], [8 * 2.0**-13]]


def test_slices_of_queries_give_the_units_of_all_together(monkeypatch):
    q, k = (reference_fp8.to_e4m3(torch.randn(3, n, 128)) for n in (7, 5))
    together = reference_fp8.score_units(q, k)

    monkeypatch.setattr(reference_fp8, "_MOST_PRODUCTS", 2 * 3 * 5 * 32)

    assert torch.equal(reference_fp8.score_units(q, k), together)
