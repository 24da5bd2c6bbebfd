"""Prefill over an FP8 cache on Hopper: in FP8 against a PyTorch model that rounds at the same points, and converted.

The FP8 kernel may differ from the model (`tests.kernels.references.reference_fp8`) only where summing in another order
rounds a weight to the other side of a tie:

    a query      Its elements may lie on a tie of e4m3, as 3/4 of a row's largest does: the last bit of float32 then
                 decides, and all of its scores change. So each quantized number is checked against the model,
                 accepting both neighbours of a tie, and the model computes with the kernel's own numbers.
    a row        Each weight is off by at most 1/8 of itself, the distance between neighbours in e4m3. The
                 errors have random signs, so the bound of a row's root mean square error is that of an error
                 of 1/8 in every weight, plus half a unit in the last place of the output.
    a result     Flipped ties increase and decrease the error about equally often, so the error against the
                 exact result may exceed the model's by at most 10 %, a margin for small cases.
    log-sum-exp  For a row that sees one key, it is off by as much as the score. The tensor cores truncate the terms
                 of a score: the bound allows sqrt(33) of their units per instruction (`score_units`), weighted
                 as the keys are.

About 40 compilations, 3 seconds each with a cold cache.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import kernels
from kernels.attention import splits
from kernels.attention.launch import LaunchConfig, TunedLaunch
from kernels.attention.problem import Phase
from kernels.attention.registry import REGISTRY
from kernels.fp8 import FP8, quantize_kv_rows
from tests.gpu.attention_cases import (
    DEVICE,
    LONG_PAIRS,
    SHORT_PAIRS,
    around_block_boundaries,
    make,
    make_problem,
    named,
)
from tests.kernels.references import reference, reference_fp8
from tests.kernels.references.problems import Layout
from tests.kernels.references.reference_fp8 import dequantize_rows

ROW = next(row for row in REGISTRY if row.name == "hopper_fp8_prefill")
# dtype, query heads, key-value heads, head dim, block size, features.
COMBINATIONS = [
    ("bfloat16", 8, 8, 128, 16, {"lse": True}),
    ("float16", 8, 1, 128, 48, {"lse": True, "softmax_scale": 0.3}),
    ("bfloat16", 64, 1, 128, 16, {"causal": False, "lse": True}),
    ("bfloat16", 4, 4, 128, 256, {"causal": False, "lse": True}),
    ("bfloat16", 8, 2, 128, 16, {"lse": True}),
    ("float16", 8, 4, 128, 1, {"causal": False}),
    ("float16", 16, 1, 128, 16, {}),
    ("bfloat16", 32, 1, 128, 16, {"lse": True}),
]
EIGHTH = 1 / 8
LAST_DIGIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LARGEST = reference_fp8.LARGEST
TILE = 128
# Error of a query's element and its scale, quotients in float32, relative to the row's largest.
SHARE = 2.0**-20
# Exponentials and logarithms have a relative error of 2^-22, and the values are below 64 in float32.
LSE_ERROR = 1e-4


def selection_for(problem, stages=None, row=ROW.name):
    """Select the row, with `stages` if given; skip on GPUs other than sm_90."""
    arch = kernels.detect(DEVICE)
    if arch.sm != 90:
        pytest.skip(f"needs sm_90, this is sm_{arch.sm}")
    selection = kernels.select(problem, arch, registry=[it for it in REGISTRY if it.name == row])
    if stages is not None:
        tuned = TunedLaunch(LaunchConfig(128, 128, 4, stages), None, "test", measured=False)
        selection = dataclasses.replace(selection, launches=(tuned,))
    return selection


def cached(combination):
    """Return the problem over an FP8 cache."""
    *fields, features = combination
    return make_problem(Phase.PREFILL, (*fields, features | {"kv_dtype": FP8}))


def rows_of(case, seq):
    """Return a sequence's keys and its values: each the numbers [n, K, D] and their scales [n, K]."""
    blocks, length = case.block_table[seq], case.seq_lens[seq]
    numbers = case.kv[:, blocks].flatten(1, 2)[:, :length]
    scales = case.kv_scale[:, blocks].transpose(2, 3).flatten(1, 2)[:, :length]
    return (numbers[0], scales[0]), (numbers[1], scales[1])


def judge(case, out, lse=None):
    """Check every row and the whole result against the bounds of the module docstring."""
    problem = case.problem
    options = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
    squares = {"kernel": 0.0, "model": 0.0}
    count = first_query = 0
    assert bool(out.isfinite().all())
    operands, first_tiles = own_operands(case)
    for seq, (queries, keys) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        rows = slice(first_query, first_query + queries)
        q, found = case.q[rows], out[rows].double()
        first_query += queries
        if not queries or not keys:
            assert not bool(found.any())
            assert lse is None or bool((lse[rows] == float("-inf")).all())
            continue
        cached_keys, cached_values = rows_of(case, seq)
        k, v = (dequantize_rows(*it, torch.float64) for it in (cached_keys, cached_values))
        own = of_sequence(operands, rows, keys, first_tiles[seq])
        judge_queries(own, q.double(), problem)
        own_q = own[0].double() * (own[1].double() / problem.softmax_scale)[..., None]
        model, _ = reference_fp8.tile_scaled(own_q, cached_keys, cached_values, **options)
        # The weights that may be off are those of the kernel's own queries.
        spread = weigh_squares(own_q, k, v, **options)
        truth = reference.attention(q, k, v, dtype=torch.float64, **options)
        off = (found - model).square().mean(-1).sqrt()
        bound = EIGHTH * spread.mean(-1).sqrt() + LAST_DIGIT[out.dtype] * model.abs().amax(-1)
        worst = int((off - bound).argmax())
        assert bool((off <= bound).all()), f"row {worst}: {off.flatten()[worst]} above the bound"
        squares["kernel"] += float((found - truth).square().sum())
        squares["model"] += float((model - truth).square().sum())
        squares["model"] += float((LAST_DIGIT[out.dtype] * truth).square().sum())
        count += truth.numel()
        if lse is not None:
            sums, units = own_log_sums(own, problem.causal)
            assert torch.equal(lse[rows].isinf(), sums.isinf())
            off = (lse[rows].double() - sums).abs().nan_to_num(0.0)
            worst = int((off - math.sqrt(reference_fp8.TERMS) * units).argmax())
            bound = math.sqrt(reference_fp8.TERMS) * float(units.flatten()[worst]) + LSE_ERROR
            assert float(off.flatten()[worst]) <= bound, f"log-sum-exp of row {worst}"
    if count:
        assert math.sqrt(squares["kernel"] / count) <= 1.1 * math.sqrt(squares["model"] / count)


def own_operands(case):
    """Return the operands that the kernel multiplies, and the first tile of each sequence."""
    from kernels.attention.hopper.fp8 import tiles as fp8_tiles

    plan = fp8_tiles.plan_key_tiles(case.batch, TILE)
    kv_heads = case.problem.num_kv_heads
    operands = fp8_tiles.make_operands(case.q, kv_heads, len(plan.tiles), TILE)
    fp8_tiles.write_queries(case.q, operands, case.problem.softmax_scale)
    fp8_tiles.write_tiles(case.kv, case.kv_scale, case.batch, plan, operands)
    return operands, plan.first_tiles.tolist()


def of_sequence(operands, rows, keys, first_tile):
    """Return a sequence's queries [m, H, D], their factors [m, H], its keys [n, K, D] and their scales [n, K]."""
    tiles = slice(first_tile, first_tile - (-keys // TILE))
    k = operands.k[:, tiles].float().flatten(1, 2)[:, :keys].transpose(0, 1)
    scales = operands.scales[0][:, tiles].repeat_interleave(TILE, 1)[:, :keys].T
    return operands.q[rows].float(), operands.factors[rows], k, scales


def judge_queries(operands, q, problem):
    """Check quantized queries and their factors against the queries [m, H, D], float64."""
    own_q, factors, _, _ = operands
    largest = q.abs().amax(-1)
    judge_rounding(own_q, q / largest[..., None] * LARGEST)
    wanted = largest / LARGEST * problem.softmax_scale
    torch.testing.assert_close(factors.double(), wanted, rtol=SHARE, atol=0)


def judge_rounding(found, x):
    """Check that each number is the e4m3 rounding of a value within the float32 error of `x`."""
    slack = LARGEST * SHARE
    low, high = (reference_fp8.to_e4m3(x + side).float() for side in (-slack, slack))
    assert bool(((low <= found) & (found <= high)).all())


def own_log_sums(operands, causal):
    """Return the log-sum-exp of the operands' scores and the units in which tensor cores sum; [m, H] float64."""
    q, factors, k, scales = operands
    group = q.shape[1] // k.shape[1]
    q = q.transpose(0, 1)
    k, scales = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, scales))
    scale = factors.double().T[:, :, None] * scales.double()[:, None, :]
    s = q.double() @ k.double().mT * scale
    key = torch.arange(s.shape[2], device=q.device)
    position = torch.arange(s.shape[2] - s.shape[1], s.shape[2], device=q.device)
    s = s.masked_fill((key[None, :] > position[:, None]) & causal, float("-inf"))
    shares = s.softmax(-1).nan_to_num(0.0)
    units = (shares * scale * reference_fp8.score_units(q, k)).sum(-1)
    return s.logsumexp(-1).T, units.T


def weigh_squares(q, k, v, *, softmax_scale, causal):
    """Return the sum of squared weights times squared values, [m, H, D] float64."""
    doubled = {"causal": causal, "dtype": torch.float64}
    # Squared weights are the softmax of twice the scores, up to normalization.
    squares = reference.attention(
        q, k, v.double().square(), softmax_scale=2 * softmax_scale, **doubled
    )
    once = reference.log_sum_exp(q, k, softmax_scale=softmax_scale, **doubled)
    twice = reference.log_sum_exp(q, k, softmax_scale=2 * softmax_scale, **doubled)
    share = torch.exp(twice - 2 * once).nan_to_num(0.0)
    return squares * share[..., None]


def check(combination, query_lens, seq_lens, stages=None):
    problem = cached(combination)
    selection = selection_for(problem, stages)
    case = make(problem, list(query_lens), list(seq_lens))
    judge(case, *case.attend(selection))


@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_it_agrees_with_its_model_over_ragged_queries_and_keys(combination):
    check(combination, *zip(*SHORT_PAIRS, strict=True))


@pytest.mark.parametrize("combination", named([COMBINATIONS[0], COMBINATIONS[4]]))
def test_it_agrees_over_long_and_short_sequences(combination):
    check(combination, *zip(*[pair for pair in LONG_PAIRS if pair[1] <= 4224], strict=True))


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16, 32, 64])
def test_it_agrees_around_tile_boundaries_for_every_group_size(group):
    lengths = around_block_boundaries(128)
    check(("bfloat16", group, 1, 128, 16, {}), lengths, lengths)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_number_of_stages_agrees(stages):
    queries, keys = zip(*SHORT_PAIRS, (700, 2100), strict=True)
    check(("bfloat16", 8, 2, 128, 16, {"lse": True}), queries, keys, stages)


@pytest.mark.parametrize("num_seqs", [3, 400], ids=["fewer than SMs", "more than SMs"])
def test_sequences_without_keys_give_zeros_and_do_not_affect_others(num_seqs):
    keys = [0 if index % 3 == 1 else 40 + (61 * index) % 700 for index in range(num_seqs)]
    queries = [1 + (13 * index) % 37 for index in range(num_seqs)]
    check(("bfloat16", 8, 2, 128, 16, {"lse": True}), queries, keys)


def quantized(case, keys, values):
    """Return a case with these keys and values [blocks, S, K, D] in its cache."""
    numbers, scale = quantize_kv_rows(torch.stack((keys, values)))
    return dataclasses.replace(case, kv=numbers, kv_scale=scale.transpose(2, 3).contiguous())


def test_each_value_is_weighted_by_its_own_key():
    """Query i matches key i only, so the output equals the values."""
    problem = cached(("bfloat16", 1, 1, 128, 16, {"causal": False}))
    case = make(problem, [128], [128], layout=Layout.CONTIGUOUS)
    keys, values = torch.zeros(2, *case.kv.shape[1:], device=DEVICE)
    blocks = case.block_table[0]
    keys[blocks] = torch.eye(128, device=DEVICE).view(8, 16, 1, 128) * 40
    values[blocks] = torch.arange(128.0, device=DEVICE).view(8, 16, 1, 1).expand(-1, -1, 1, 128)
    case.q.copy_(40 * torch.eye(128, device=DEVICE)[:, None])

    out, _ = quantized(case, keys, values).attend(selection_for(problem))

    wanted = torch.arange(128.0, device=DEVICE).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(out[:, 0, 5].float(), wanted, rtol=0.01, atol=0.01)


def test_outliers_increase_the_error_no_more_than_in_the_model():
    problem = cached(("bfloat16", 8, 2, 128, 16, {}))
    case = make(problem, [1500], [1500])
    generator = torch.Generator(DEVICE).manual_seed(2)
    rows = torch.randn((2, *case.kv.shape[1:]), generator=generator, device=DEVICE)
    for x in (case.q, rows):
        rare = torch.rand(x.shape, generator=generator, device=DEVICE) < 0.001
        x.add_(10 * torch.randn(x.shape, generator=generator, device=DEVICE) * rare)
    case = quantized(case, *rows)

    judge(case, *case.attend(selection_for(problem)))


def run(plan, case, out):
    kernels.prefill_attention(case.q, case.kv, plan, out, kv_scale=case.kv_scale)
    return out


@pytest.mark.parametrize("row", ["hopper_fp8_prefill", "hopper_unpacked_prefill"])
@pytest.mark.parametrize("most_bytes", [None, 1 << 20], ids=["together", "in parts"])
def test_one_plan_can_be_used_for_several_layers(row, most_bytes, monkeypatch):
    if most_bytes is not None:
        monkeypatch.setattr(splits, "MOST_BYTES", most_bytes)
    problem = cached(("bfloat16", 8, 2, 128, 16, {}))
    case = make(problem, [100, 1, 700], [100, 500, 1000])
    layers = [
        dataclasses.replace(case, q=case.q.roll(index, 0), kv_scale=case.kv_scale.roll(index, 2))
        for index in range(2)
    ]
    selection = selection_for(problem, row=row)
    plan = kernels.plan_attention(problem, case.batch, selection=selection)
    outs = [run(plan, layer, torch.full_like(case.q, float("nan"))) for layer in layers]

    for layer, out in zip(layers, outs, strict=True):
        if row == ROW.name:
            judge(layer, out)
        else:
            layer.check(out)


@pytest.mark.parametrize("row", ["hopper_fp8_prefill", "hopper_unpacked_prefill"])
def test_a_replayed_prefill_reads_changed_lengths(row):
    problem = cached(("bfloat16", 8, 2, 128, 16, {}))
    selection = selection_for(problem, row=row)
    case = make(problem, [300, 40, 60], [1000, 40, 900])
    out = torch.full_like(case.q, float("nan"))
    run(kernels.plan_attention(problem, case.batch, selection=selection), case, out)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = kernels.plan_attention(problem, case.batch, selection=selection)
        run(plan, case, out)
    for queries, keys in (
        ([0, 300, 340, 400], [1000, 40, 900]),
        ([0, 1, 30, 400], [3, 29, 900]),
        ([0, 100, 100, 150], [700, 0, 300]),
        ([0, 300, 340, 400], [1000, 40, 900]),
    ):
        case.batch.cu_seqlens_q.copy_(torch.tensor(queries, dtype=torch.int32))
        case.batch.seq_lens.copy_(torch.tensor(keys, dtype=torch.int32))
        out.fill_(7.0)
        graph.replay()

        eager = torch.full_like(out, 7.0)
        plan = kernels.plan_attention(problem, case.batch, selection=selection)
        assert torch.equal(out, run(plan, case, eager))
        assert bool((out[queries[-1] :] == 7.0).all())


def test_a_long_prompt_in_chunks_is_as_exact_as_at_once():
    """The last chunk's rows over 20,000 keys agree with the model."""
    check(("bfloat16", 8, 2, 128, 16, {}), [300], [20000])
