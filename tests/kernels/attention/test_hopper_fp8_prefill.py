"""The FP8 prefill without a GPU: its selection, its quantization, and the error of its rounding."""

from __future__ import annotations

import math

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from kernels.testing import reference, reference_fp8
from kernels.testing.problems import make_packed_case
from tests.kernels.triton_interpreter import HAS_TRITON, interpreted

ROW = next(row for row in REGISTRY if row.name == "hopper_fp8_prefill")
H100 = CATALOGUE["h100"]
BLOCK = 128
# Of every 16 keys, a thread holds the scores of these four; as an FP8 operand it holds four adjacent slots.
KEYS_IN_SLOTS = [
    sixteen + key
    for sixteen in range(0, BLOCK, 16)
    for thread in range(4)
    for key in (2 * thread, 2 * thread + 1, 2 * thread + 8, 2 * thread + 9)
]
LARGEST = 448.0


def problem(phase=Phase.PREFILL, **more):
    fields = {"dtype": "bfloat16", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    fields |= {"block_size": None, "softmax_scale": 0.1, "fp8": True}
    return AttentionProblem(phase, **(fields | more))


@pytest.mark.parametrize("arch", ["h100", "h200"])
@pytest.mark.parametrize(
    "more",
    [
        {}, {"dtype": "float16"}, {"causal": False}, {"lse": True},
        {"num_heads": 8}, {"num_heads": 64, "num_kv_heads": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_problem_that_allows_fp8_selects_it_on_hopper(arch, more):
    assert kernels.select(problem(**more), CATALOGUE[arch]).spec is ROW


def test_a_problem_that_does_not_allow_fp8_never_selects_it_and_states_the_reason():
    selection = kernels.select(problem(fp8=False), H100)

    assert selection.spec.name == "hopper_prefill"
    assert dict(selection.refusals)[ROW.name] == ("the problem does not allow FP8",)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"block_size": 16}, "no paged cache"),
        ({"head_dim": 64}, "head_dim 64 is not one of [128]"),
        ({"head_dim": 256}, "head_dim 256 is not one of [128]"),
        ({"dtype": "float32"}, "no float32"),
        ({"num_heads": 24}, "no groups of 3 query heads"),
        ({"sliding_window": 100}, "no sliding window"),
        ({"softcap": 15.0}, "no softcap"),
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", [arch for arch in CATALOGUE.values() if arch.sm >= 80], ids=str)
def test_allowing_fp8_changes_nothing_if_the_row_does_not_support_the_problem(arch, more, reason):
    allowed = kernels.select(problem(**more), arch)
    forbidden = kernels.select(problem(fp8=False, **more), arch)

    assert allowed.spec is forbidden.spec
    assert allowed.launches == forbidden.launches
    assert any(told.startswith(reason) for told in dict(allowed.refusals)[ROW.name])


@pytest.mark.parametrize("arch", CATALOGUE.values(), ids=str)
def test_allowing_fp8_does_not_change_a_decode(arch):
    allowed = kernels.select(problem(Phase.DECODE, block_size=16), arch)

    assert (
        allowed.spec is kernels.select(problem(Phase.DECODE, block_size=16, fp8=False), arch).spec
    )


def test_the_problem_shows_that_fp8_is_allowed_and_the_reason_that_it_is_used():
    selection = kernels.select(problem(), H100)

    assert str(problem()).endswith("packed fp8")
    assert "fp8" not in str(problem(fp8=False))
    assert "multiplies in FP8, as the problem allows" in selection.why


def outliers(generator, *shape):
    """Return normal numbers, of which one in a thousand is ten times as large, as in trained models."""
    x = torch.randn(*shape, generator=generator)
    rare = torch.rand(*shape, generator=generator) < 0.001
    return x + 10 * torch.randn(*shape, generator=generator) * rare


@pytest.fixture
def quantize():
    if not HAS_TRITON:
        pytest.skip("Triton is not built for this host")
    from kernels.attention.hopper import fp8_quantize as hopper_fp8_quantize

    return hopper_fp8_quantize


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_rotation_keeps_scores_and_spreads_an_outlier(quantize, head_dim):
    rotation = quantize.rotation(head_dim, torch.float64, torch.device("cpu"))
    q, k = torch.randn(2, 5, head_dim, dtype=torch.float64)
    outlier = torch.zeros(head_dim, dtype=torch.float64)
    outlier[7] = 3.0

    torch.testing.assert_close((q @ rotation) @ (k @ rotation).T / head_dim, q @ k.T)
    assert bool(((outlier @ rotation).abs() == 3.0).all())


def check_bytes(found, x, dims):
    """Compare bytes with PyTorch and return the scales; sums in another order may round a tie the other way."""
    largest = x.abs().amax(dims, keepdim=True)
    expected = reference_fp8.to_e4m3(x * (LARGEST / largest)).float()
    unequal = expected != found.float()

    assert unequal.float().mean() < 1e-3
    assert bool((found.float() - expected).abs().le(expected.abs() / 8 + 2**-9).all())
    return (largest / LARGEST).squeeze(dims)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_queries_keys_and_values_are_quantized_as_in_pytorch(quantize, head_dim, dtype):
    generator = torch.Generator().manual_seed(head_dim)
    lengths, heads, factor = [300, 0, 128, 77], 2, 1.5
    tokens = sum(lengths)
    q = outliers(generator, 90, 6, head_dim).to(dtype)
    # The values follow the keys of the same token, as in the output of one projection.
    kv = outliers(generator, tokens, 2, heads, head_dim).to(dtype).movedim(1, 0)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    plan = quantize.plan_key_blocks(offsets, tokens, BLOCK)
    buffers = quantize.make_buffers(q, kv, plan)
    quantize.quantize(q, kv, plan, buffers, factor)

    rotation = quantize.rotation(head_dim, torch.float64, torch.device("cpu"))
    scale = check_bytes(buffers.q, q.double() @ rotation, (2,))
    torch.testing.assert_close(
        buffers.factors.double(), scale * factor / head_dim, rtol=1e-5, atol=0
    )
    assert plan.first_blocks.tolist() == [0, 3, 3, 4]
    for seq, length in enumerate(lengths):
        first, blocks = int(plan.first_blocks[seq]), -(-length // BLOCK)
        start = int(offsets[seq])
        for head in range(heads if length else 0):
            padded = torch.zeros(2, blocks * BLOCK, head_dim, dtype=torch.float64)
            padded[:, :length] = kv[:, start : start + length, head].double()
            keys, values = padded.view(2, blocks, BLOCK, head_dim)
            here = slice(first, first + blocks)
            scale = check_bytes(buffers.k[head, here], keys @ rotation, (1, 2))
            torch.testing.assert_close(
                buffers.scales[0, head, here].double(), scale, rtol=1e-5, atol=0
            )
            slots = values[:, KEYS_IN_SLOTS].transpose(1, 2)
            scale = check_bytes(buffers.v[head, here], slots, (1, 2))
            for found, wanted in ((1, scale), (2, 1 / scale)):
                scales = buffers.scales[found, head, here].double()
                torch.testing.assert_close(scales, wanted, rtol=1e-5, atol=0)


@interpreted
def test_a_block_of_zeros_has_a_scale_whose_inverse_is_finite(quantize):
    q, kv = torch.zeros(3, 2, 64, dtype=torch.bfloat16), torch.zeros(2, 3, 1, 64).bfloat16()
    plan = quantize.plan_key_blocks(torch.tensor([0, 3], dtype=torch.int32), 3, BLOCK)
    buffers = quantize.make_buffers(q, kv, plan)

    quantize.quantize(q, kv, plan, buffers, 1.0)

    assert not bool(buffers.k.float().any())
    assert not bool(buffers.v.float().any())
    assert bool(buffers.scales.isfinite().all())
    assert bool((buffers.scales > 0).all())


@interpreted
def test_a_step_with_no_query_or_no_key_launches_nothing():
    asked = problem(num_heads=8, num_kv_heads=2, lse=True)
    for queries, keys in (([20, 3], [0, 0]), ([0], [5])):
        case = make_packed_case(asked, queries, keys)

        out, lse = case.attend(kernels.select(asked, H100, registry=(ROW,)))

        assert out.shape[0] == sum(queries)
        assert not bool(out.any())
        assert bool((lse == float("-inf")).all())


def rmse(found, truth):
    return float((found.double() - truth).square().mean().sqrt())


@pytest.mark.parametrize("causal", [True, False])
def test_the_reference_of_the_algorithm_differs_from_attention_only_by_rounding(quantize, causal):
    """Weights and operands in e4m3 each have a relative error of at most 1/16; the result has a few times that."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, h, 64, generator=generator) for n, h in ((90, 4), (300, 2), (300, 2)))
    options = {"softmax_scale": 0.125, "causal": causal}
    rotation = quantize.rotation(64, torch.float64, q.device)

    out, lse = reference_fp8.block_scaled(q, k, v, rotation, **options)
    plain = reference_fp8.per_tensor(q, k, v, **options)

    truth = reference.attention(q, k, v, dtype=torch.float64, **options)
    sums = reference.log_sum_exp(q, k, dtype=torch.float64, **options)
    size = float(truth.square().mean().sqrt())
    assert rmse(out, truth) < 0.1 * size
    assert rmse(plain, truth) < 0.1 * size
    torch.testing.assert_close(lse, sums, rtol=0, atol=0.1)


def test_queries_that_see_no_key_are_zero_in_the_references(quantize):
    q, kv = torch.randn(5, 2, 64), torch.randn(2, 3, 1, 64)
    rotation = quantize.rotation(64, torch.float64, q.device)

    out, lse = reference_fp8.block_scaled(q, *kv, rotation, softmax_scale=0.125)
    plain = reference_fp8.per_tensor(q, *kv, softmax_scale=0.125)

    assert not bool(out[:2].any() or plain[:2].any())
    assert bool((lse[:2] == float("-inf")).all())
    assert bool(lse[2:].isfinite().all())


@pytest.mark.slow
def test_over_16384_keys_with_outliers_block_scales_are_2_5_times_as_exact_as_one_per_tensor(
    quantize,
):
    """1024 queries of a head over all keys, three seeds together. At 4096 keys the ratio is only about 1.8."""
    rotation = quantize.rotation(128, torch.float64, torch.device("cpu"))
    options = {"softmax_scale": 128**-0.5, "causal": False}
    squares = {"plain": 0.0, "blocks": 0.0}
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (outliers(generator, n, 1, 128).bfloat16() for n in (1024, 16384, 16384))
        truth = reference.attention(q, k, v, dtype=torch.float64, **options)
        rounded = options | {"dtype": torch.float32}
        squares["plain"] += rmse(reference_fp8.per_tensor(q, k, v, **rounded), truth) ** 2
        blocks, _ = reference_fp8.block_scaled(q, k, v, rotation, **rounded)
        squares["blocks"] += rmse(blocks, truth) ** 2

    assert math.sqrt(squares["plain"] / squares["blocks"]) >= 2.5


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
