"""Embeddings, argmax, norms, gates, rotation and cache writes in Triton's interpreter, against PyTorch."""

from __future__ import annotations

import math

import pytest
import torch

import kernels
from kernels.fp8 import quantize_kv_rows
from kernels.hadamard import hadamard_transform
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import VECTOR
from kernels.linear.select import LinearChoice, LinearLaunch
from kernels.norms import pytorch
from kernels.norms.gpu.norm_and_gate import (
    activate,
    add_layer_norm,
    add_rms_norm,
    silu_and_mul,
)
from kernels.norms.gpu.output_gate import multiply_by_sigmoid
from kernels.rope.gpu import rope_cache
from kernels.rope.gpu.rope_cache import RotationLaunch, rope_and_write_kv, rotation_launch
from kernels.sampling.gpu.best_token import best_tokens
from kernels.sampling.gpu.embed import embed
from kernels.sampling.tile_best import TileBest
from kernels.sampling.tokens import embed_tokens
from tests.kernels import triton_interpreter
from tests.kernels.linear.layer import linear
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than
from tests.kernels.references.reference_fp8 import dequantize_rows

pytestmark = triton_interpreter.interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CACHES = [
    (dtype, quantized)
    for quantized in (False, True)
    for dtype in DTYPES
    if not (quantized and dtype is torch.float32)
]
"""Dtypes of models with whether their caches are in FP8, which those of float32 models are not."""
LAUNCH = LinearLaunch(4, 256, 1)
INPUTS = 64


@pytest.fixture(autouse=True)
def _poison():
    torch.manual_seed(0)
    with triton_interpreter.poisoned_memory():
        yield


def head(x, weight):
    """Multiply by the LM head; returns ids, whether their logits are finite, log-probabilities and logits."""
    problem = LinearProblem(len(x), len(weight), x.shape[1], "float16")
    choice = LinearChoice(problem, VECTOR, LAUNCH, "for the test")
    best = TileBest.empty(len(x), choice.tiles, "cpu")
    out = linear(x, weight, choice, best=best)
    ids, tokens = torch.empty((2, len(x)), dtype=torch.int64)
    logprobs = torch.empty(len(x))
    best_tokens(best, ids, tokens, logprobs)
    finite = tokens >= 0
    assert torch.equal(torch.where(finite, tokens, ids), ids)
    return ids, finite, logprobs, out


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("vocabulary", [7, 64, 301])
def test_the_greedy_token_is_the_argmax_of_the_logits(rows, vocabulary):
    x, weight = torch.randn(rows, INPUTS).half(), torch.randn(vocabulary, INPUTS).half()

    token, finite, logprobs, logits = head(x, weight)

    assert torch.equal(token, logits.float().argmax(-1))
    assert finite.all()
    # The log-probability is that of the stored, rounded logits.
    truth = torch.log_softmax(logits.double(), -1).amax(-1)
    torch.testing.assert_close(logprobs.double(), truth, rtol=1e-5, atol=1e-5)


def test_a_log_probability_does_not_depend_on_the_other_rows():
    x, weight = torch.randn(4, INPUTS).half() * 9, torch.randn(301, INPUTS).half()
    other = torch.full_like(x, float("nan"))
    other[2] = x[2]

    found = head(x, weight)[2]

    assert torch.equal(head(other, weight)[2][2], found[2])


@pytest.mark.parametrize("equals", [(5, 9), (3, 150), (298, 299)])
def test_the_smallest_id_wins_among_equals(equals):
    x, weight = torch.ones(2, INPUTS).half(), torch.full((300, INPUTS), -1.0).half()
    weight[list(equals)] = 0.0
    weight[equals[1], 0] = -0.0

    token, _, logprobs, _ = head(x, weight)

    assert token.tolist() == [equals[0]] * 2
    torch.testing.assert_close(logprobs, torch.full((2,), 2.0).log().neg(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("value", "finite"),
    [("nan", False), ("inf", False), ("-inf", True), ("60000", True)],
)
def test_a_row_without_a_finite_largest_logit_is_marked(value, finite):
    x, weight = torch.zeros(2, INPUTS).half(), torch.zeros(40, INPUTS).half()
    x[1, 0], weight[17, 0] = 1.0, float(value)

    token, is_finite, logprobs, _ = head(x, weight)

    # The product of 0 and infinity is NaN too.
    assert is_finite.tolist() == [value == "60000", finite]
    if value == "-inf":
        torch.testing.assert_close(logprobs[1].item(), -math.log(39), rtol=1e-5, atol=0.0)
    else:
        assert token[1] == 17


def test_logits_of_minus_infinity_everywhere_have_no_token():
    x, weight = torch.ones(1, INPUTS).half(), torch.full((40, INPUTS), float("-inf")).half()

    _, finite, _, _ = head(x, weight)

    assert not finite.any()


@pytest.mark.parametrize("tiles", [1, 5, 4096, 9000])
def test_the_largest_of_any_number_of_keys_is_found(tiles):
    values = torch.randn(3, tiles) * 4
    bits = values.view(torch.int32).long()
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32 | 0x7FFFFFFF - torch.arange(tiles)
    totals = torch.rand(3, tiles) + 1
    ids, tokens = torch.empty((2, 3), dtype=torch.int64)
    logprobs = torch.empty(3)

    best_tokens(TileBest(keys, totals), ids, tokens, logprobs)

    assert torch.equal(ids, values.argmax(-1))
    distances = (values - values.amax(-1, keepdim=True)).double()
    truth = -(totals * distances.exp()).sum(-1).log()
    torch.testing.assert_close(logprobs.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 576, 1024])
@pytest.mark.parametrize("splits", [0, 1, 8], ids=lambda splits: f"{splits} parts")
def test_a_norm_and_the_partial_sums_that_it_adds_agree_with_the_formula(dtype, size, splits):
    before, parts = torch.randn(5, size).to(dtype), torch.randn(splits, 5, size)
    weight = torch.rand(size).to(dtype)
    x = before.clone()
    total = (before.float() + parts.sum(0)).to(dtype)

    out = add_rms_norm(x, weight, 1e-5, parts=parts if splits else None)

    torch.testing.assert_close(x, total)
    assert splits or torch.equal(x, before)
    truth = reference.rms_norm(x, weight, 1e-5, torch.float64)
    assert_no_worse_than(out, truth, reference.rms_norm(x, weight, 1e-5, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 576])
@pytest.mark.parametrize("splits", [0, 2], ids=lambda splits: f"{splits} parts")
def test_a_layer_norm_and_the_partial_sums_that_it_adds_agree_with_the_formula(dtype, size, splits):
    before, parts = (torch.randn(5, size) + 3).to(dtype), torch.randn(splits, 5, size)
    weight, bias = torch.rand(size).to(dtype), torch.randn(size).to(dtype)
    x = before.clone()
    total = (before.float() + parts.sum(0)).to(dtype)

    out = add_layer_norm(x, weight, bias, 1e-5, parts=parts if splits else None)

    torch.testing.assert_close(x, total)
    truth = reference.layer_norm(x, weight, bias, 1e-5, torch.float64)
    assert_no_worse_than(out, truth, reference.layer_norm(x, weight, bias, 1e-5, dtype))


def test_a_norm_can_have_weights_and_results_in_float32():
    x, weight = torch.randn(3, 96).bfloat16(), torch.rand(96) + 0.5

    out = add_rms_norm(x, weight, 1e-5, dtype=torch.float32)

    assert out.dtype is torch.float32
    torch.testing.assert_close(out, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_an_activation_agrees_with_its_formula(dtype, function, gated):
    x = (torch.randn(3, 1040) * 4).to(dtype)

    out = activate(x, function, gated=gated)

    wide = x.double()
    first, second = wide.chunk(2, -1) if gated else (wide, 1.0)
    truth = reference.activation(first, function) * second
    assert_no_worse_than(out, truth, pytorch.activate(x, function, gated=gated))


@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "relu", "relu2"])
def test_an_activation_of_special_values_is_that_of_pytorch(function):
    x = torch.tensor([[0.0, -0.0, 1e4, -1e4, 1e30, float("nan"), -1e30]])

    out = activate(x, function, gated=False)

    torch.testing.assert_close(out, pytorch.activate(x, function, gated=False), equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 576, 1500])
def test_a_gate_agrees_with_its_formula(dtype, size):
    x = (torch.randn(3, 2 * size) * 4).to(dtype)

    out = silu_and_mul(x)

    truth = reference.silu_and_mul(x, torch.float64)
    assert_no_worse_than(out, truth, kernels.silu_and_mul(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 576, 2048])
def test_embeddings_are_those_of_ids_and_of_previously_sampled_tokens(dtype, size):
    table = torch.randn(300, size).to(dtype)
    ids, sampled = torch.tensor([299, -1, 0, -3, 7, -2]), torch.tensor([5, 299, 0, 77])

    out = embed(ids, sampled, table)

    assert torch.equal(out, table[[299, 5, 0, 0, 7, 299]])
    assert torch.equal(out, embed_tokens(ids, table, sampled))
    known = torch.tensor([4, 299])
    assert torch.equal(embed(known, None, table), embed_tokens(known, table))
    assert embed(known[:0], None, table).shape == (0, size)


class CacheCase:
    """The output of a QKV projection, a cache filled with 7, and the results of PyTorch's operations."""

    def __init__(self, tokens, heads, kv_heads, head_dim, dtype, *, norms, block_size=16, seed=0):
        torch.manual_seed(seed)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        size = (heads + 2 * kv_heads) * head_dim
        around = torch.full((tokens, size + 16), float("nan"), dtype=dtype)
        self.qkv = around[:, :size]
        self.qkv.copy_(torch.randn(self.qkv.shape) * 2)
        shape = (2, tokens // block_size + 2, block_size, kv_heads, head_dim)
        self.kv = torch.full(shape, 7.0, dtype=dtype)
        self.positions = torch.randint(0, 99, (tokens,))
        self.slots = torch.randperm(shape[1] * block_size)[:tokens].int()
        self.slots[tokens // 2] = -1 if tokens > 1 else 3
        self.rope = kernels.rope_tables(torch.rand(99, head_dim // 2) * 100, dtype=dtype)
        self.norms = tuple(torch.rand(2, head_dim).to(dtype) + 0.5) if norms else None

    def expected(self, dtype=None):
        """Compute queries and cache step by step with PyTorch, in `dtype` if given, else in qkv's."""
        dtype = dtype or self.qkv.dtype
        parts = [self.heads, self.kv_heads, self.kv_heads]
        qkv = self.qkv.to(dtype).unflatten(1, (-1, self.head_dim))
        q, k, v = torch.split(qkv, parts, 1)
        if self.norms is not None:
            q, k = (
                kernels.rms_norm(x, w.to(dtype), 1e-5)
                for x, w in zip((q, k), self.norms, strict=True)
            )
        cos, sin = (table[self.positions].to(dtype) for table in self.rope)
        q, k = (kernels.apply_rope(x, cos, sin) for x in (q, k))
        kv = reference.write_kv(k, v, self.kv.to(dtype), self.slots.tolist())
        return q, kv


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(1, 16, 8, 128), (5, 6, 2, 64), (3, 7, 1, 80), (2, 4, 4, 96)],
)
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
def test_queries_are_rotated_and_keys_and_values_reach_their_slots(
    dtype, norms, tokens, heads, kv_heads, head_dim, in_place
):
    case = CacheCase(tokens, heads, kv_heads, head_dim, dtype, norms=norms)
    (q, kv), (plain_q, plain_kv) = case.expected(torch.float32), case.expected()
    values = case.qkv.clone()[:, (heads + kv_heads) * head_dim :].view(tokens, kv_heads, head_dim)
    q_out = None if in_place else torch.full((tokens, heads, head_dim), 7.0, dtype=dtype)

    found = rope_and_write_kv(
        case.qkv, case.kv, case.rope, case.positions, case.slots,
        norms=case.norms, eps=1e-5, q_out=q_out,
    )  # fmt: skip

    assert found.data_ptr() == (case.qkv if in_place else q_out).data_ptr()
    assert_no_worse_than(found, q, plain_q)
    assert_no_worse_than(case.kv, kv, plain_kv)
    stored = case.kv[1].flatten(0, 1)[case.slots.long()]
    written = case.slots >= 0
    assert torch.equal(stored[written], values[written])
    untouched = torch.ones(case.kv[0].flatten(0, 1).shape[0], dtype=torch.bool)
    untouched[case.slots[written].long()] = False
    assert bool((case.kv.flatten(1, 2)[:, untouched] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim"),
    [(1, 16, 8, 128), (5, 6, 2, 64), (3, 7, 1, 80), (2, 4, 4, 96)],
)
@pytest.mark.parametrize(
    "launch", [None, RotationLaunch(16, 3, 4)], ids=["few tokens", "tensor cores"]
)
def test_over_fp8_caches_heads_are_mixed_and_keys_and_values_quantized(
    dtype, norms, tokens, heads, kv_heads, head_dim, launch, monkeypatch
):
    case = CacheCase(tokens, heads, kv_heads, head_dim, dtype, norms=norms)
    values = case.qkv.clone()[:, (heads + kv_heads) * head_dim :].view(tokens, kv_heads, head_dim)
    q, kv = case.expected(torch.float32)
    plain_q, plain_kv = case.expected()
    numbers = torch.full(case.kv.shape, 7.0).to(torch.float8_e4m3fn)
    scale = torch.full((2, len(numbers[0]), kv_heads, 16), 7.0)
    if launch is not None:
        monkeypatch.setattr(rope_cache, "rotation_launch", lambda *_, **__: launch)

    found = rope_and_write_kv(
        case.qkv, numbers, case.rope, case.positions, case.slots,
        norms=case.norms, eps=1e-5, kv_scale=scale,
    )  # fmt: skip

    assert_no_worse_than(found, hadamard_transform(q), hadamard_transform(plain_q))
    written = case.slots >= 0
    slots = case.slots[written].long()
    stored = numbers.flatten(1, 2)[:, slots]
    scales = scale.transpose(2, 3).flatten(1, 2)[:, slots]
    wanted, wanted_scales = quantize_kv_rows(values[written])
    assert torch.equal(stored[1].view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales[1], wanted_scales)
    keys, plain_keys = (
        hadamard_transform(it[0].flatten(0, 1)[slots].float()) for it in (kv, plain_kv)
    )
    # The rounding to e4m3, and as much as the rounding to `dtype` before changes a key.
    error = (dequantize_rows(stored[0], scales[0], torch.float32) - keys).abs()
    allowed = (
        keys.abs() / 16
        + 2.0**-10 * scales[0][..., None]
        + (plain_keys - keys).norm(dim=-1, keepdim=True)
    )
    assert bool((error <= allowed + 1e-5).all())
    untouched = torch.ones(numbers[0].flatten(0, 1).shape[0], dtype=torch.bool)
    untouched[slots] = False
    assert bool((numbers.flatten(1, 2)[:, untouched].float() == 7.0).all())
    assert bool((scale.transpose(2, 3).flatten(1, 2)[:, untouched] == 7.0).all())


@pytest.mark.parametrize(("dtype", "quantized"), CACHES)
@pytest.mark.parametrize(
    "launch", [None, RotationLaunch(4, 4, 1)], ids=["few tokens", "several heads"]
)
def test_values_are_normalized_without_a_weight(dtype, quantized, launch, monkeypatch):
    case = CacheCase(5, 6, 2, 64, dtype, norms=True)
    values = case.qkv.clone()[:, 8 * 64 :].view(5, 2, 64)
    if launch is not None:
        monkeypatch.setattr(rope_cache, "rotation_launch", lambda *_, **__: launch)
    kv, scale = case.kv, None
    if quantized:
        kv, scale = case.kv.to(torch.float8_e4m3fn), torch.ones(2, len(case.kv[0]), 2, 16)

    rope_and_write_kv(
        case.qkv, kv, case.rope, case.positions, case.slots,
        norms=case.norms, eps=1e-5, value_eps=0.5, kv_scale=scale,
    )  # fmt: skip

    written = case.slots >= 0
    slots = case.slots[written].long()
    truth = torch.nn.functional.rms_norm(values.float(), (64,), eps=0.5)
    plain = torch.nn.functional.rms_norm(values, (64,), eps=0.5)
    stored = kv[1].flatten(0, 1)[slots]
    if quantized:
        assert scale is not None
        scales = scale[1].transpose(1, 2).flatten(0, 1)[slots]
        found, truth = dequantize_rows(stored, scales, torch.float32), truth[written]
        assert bool(((found - truth).abs() <= truth.abs() / 14 + scales[..., None] / 512).all())
    else:
        assert_no_worse_than(stored, truth[written], plain[written])


@pytest.mark.parametrize(("dtype", "quantized"), CACHES)
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 16, 128), (5, 6, 64), (3, 7, 80)])
def test_queries_alone_are_rotated_and_nothing_is_written(
    dtype, norms, quantized, tokens, heads, head_dim
):
    case = CacheCase(tokens, heads, 2, head_dim, dtype, norms=norms)
    (q, _), (plain_q, _) = case.expected(torch.float32), case.expected()
    kv, scale = case.kv, None
    if quantized:
        kv, scale = case.kv.to(torch.float8_e4m3fn), torch.full((2, len(case.kv[0]), 2, 16), 7.0)
        q, plain_q = hadamard_transform(q), hadamard_transform(plain_q)
    queries = case.qkv[:, : heads * head_dim]

    found = rope_and_write_kv(
        queries, kv[:, :, :, :0], case.rope, case.positions, case.slots,
        norms=case.norms, eps=1e-5, kv_scale=scale,
    )  # fmt: skip

    assert found.data_ptr() == queries.data_ptr()
    assert_no_worse_than(found, q, plain_q)
    assert bool((kv.float() == 7.0).all())
    assert scale is None or bool((scale == 7.0).all())


@pytest.mark.parametrize(
    ("bytes_of", "lines"),
    [((4096, 1000), (32, 7)), ((30 << 20, 4096), (24 << 13, 0)), ((4 << 20, 40 << 20), (4 << 13, 20 << 13))],
)  # fmt: skip
def test_prefetched_lines_are_bounded_and_those_of_the_first_tensor_come_first(bytes_of, lines):
    tensors = tuple(torch.empty(size, dtype=torch.int8, device="meta") for size in bytes_of)

    assert rope_cache.lines_ahead(tensors) == lines
    assert rope_cache.lines_ahead(None) == (0, 0)


@pytest.mark.parametrize(
    "launch", [RotationLaunch(1, 4, 1), RotationLaunch(4, 4, 1), RotationLaunch(4, 3, 2)], ids=str
)
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(14, 2), (8, 4), (3, 1)])
def test_programs_with_several_tokens_and_heads_give_the_same_result(
    launch, norms, heads, kv_heads, monkeypatch
):
    case, same = (
        CacheCase(9, heads, kv_heads, 32, torch.float16, norms=norms, seed=1) for _ in range(2)
    )
    around = {"norms": case.norms, "eps": 1e-5}
    ahead = tuple(torch.empty(1000, dtype=torch.int8) for _ in range(2))
    one = rope_and_write_kv(same.qkv, same.kv, same.rope, same.positions, same.slots, **around)
    monkeypatch.setattr(rope_cache, "rotation_launch", lambda *_, **__: launch)

    found = rope_and_write_kv(
        case.qkv, case.kv, case.rope, case.positions, case.slots, ahead=ahead, **around
    )

    assert torch.equal(found, one)
    assert torch.equal(case.kv, same.kv)


@pytest.mark.parametrize(
    ("tokens", "heads", "half", "wanted"),
    [
        (1, 32, 64, (1, 1, 1)),
        (32, 32, 64, (1, 1, 1)),
        (33, 32, 64, (4, 1, 1)),
        (256, 48, 32, (8, 1, 1)),
        (512, 33, 64, (4, 4, 1)),
        (4096, 32, 64, (16, 4, 4)),
        (4096, 8, 128, (8, 4, 4)),
        (512, 33, 16, (16, 4, 1)),
        (4096, 6, 8, (128, 1, 4)),
        (512, 33, 8, (32, 1, 1)),
    ],
)
def test_programs_have_more_tokens_and_heads_in_larger_steps(tokens, heads, half, wanted):
    assert rotation_launch(tokens, heads, half) == wanted


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(16, (1, 1, 1)), (17, (4, 1, 1)), (1023, (4, 1, 1)), (1024, (16, 4, 4))]
)
def test_programs_that_write_an_fp8_cache_have_fewer_heads(tokens, wanted):
    assert rotation_launch(tokens, 32, 64, fp8=True) == wanted


def test_the_launch_of_a_batch_invariant_step_does_not_depend_on_its_tokens():
    for heads, half in ((1, 8), (1, 16), (32, 64), (96, 128)):
        found = {
            rotation_launch(tokens, heads, half, batch_invariant=True)
            for tokens in (1, 2, 64, 500, 5000)
        }

        assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (2, 1100)])
def test_an_output_gate_has_the_bits_of_separate_operations(dtype, rows, size):
    x, beside = torch.randn(rows, size).to(dtype), torch.randn(rows, size + 24).to(dtype) * 4
    gate = beside[:, :size]
    expected = pytorch.multiply_by_sigmoid(x, gate)

    found = multiply_by_sigmoid(x, gate)

    assert found is x
    if dtype is torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    else:
        # The exponential functions differ, and with them few roundings.
        assert (found != expected).float().mean() < 0.01
        torch.testing.assert_close(found, expected)


def test_an_output_gate_of_no_rows_is_empty():
    x = torch.empty(0, 64)

    assert multiply_by_sigmoid(x, torch.empty(0, 64)) is x
