"""Matrix products of 5 to 256 rows on Hopper's tensor cores: accuracy, determinism, independence of rows."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels import PagedBatch
from kernels.fp8 import quantize_rows
from kernels.linear import registry
from kernels.linear.gpu.matrix import MatrixLinear
from kernels.linear.problem import LinearProblem
from kernels.linear.weights import LinearArguments
from kernels.norms.gpu.norm_and_gate import add_rms_norm
from kernels.weight_format import FP8_ROWS
from model.decoder import DecoderLM
from tests.gpu.test_single_launch_gpu import QWEN
from tests.kernels.linear.weights import linear_weights
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than
from tests.model.configs import changed
from tests.model.executors import paged

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

ROWS = (1, 5, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256)
EPS = 1e-6
REPEATS = 50


@pytest.fixture(autouse=True)
def on_hopper():
    if kernels.detect("cuda").sm != 90:
        pytest.skip("the kernel needs sm_90")


def random(*shape, dtype=torch.bfloat16, scale=1.0, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)


class Product:
    """A projection bound to its weights; `dtype` is that of its inputs, by default of the weights."""

    def __init__(
        self, weight, bias=None, scale=None, *, gated=False, in_parts=False, kernel=MatrixLinear, dtype=None
    ):  # fmt: skip
        outputs, inputs = weight.shape
        problem = LinearProblem(
            1, outputs // (1 + gated), inputs, gated=gated, residual=in_parts, layer_weights=1,
            dtype=str(dtype or weight.dtype).removeprefix("torch."),
            **({} if scale is None else {"format": FP8_ROWS}),
        )  # fmt: skip
        self.linear = kernel(linear_weights(weight, bias, scale), problem)

    def __call__(self, x, *, pdl):
        return self.linear(x, None, None, LinearArguments(pdl=pdl))


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("outputs", "inputs", "kind"),
    [
        (4096, 1024, "plain"),
        (6144, 1024, "gated"),
        (1024, 2048, "parts"),
        (1024, 3072, "parts"),
        (3072, 2048, "bias"),
        (16384, 2048, "gated"),
        (2048, 8192, "parts"),
        (192, 320, "plain"),
        (28672, 1024, "gated"),
        (64, 64, "parts"),
        (128, 64, "gated"),
    ],
)
def test_a_layer_agrees_with_its_formula(outputs, inputs, kind, dtype, fp8):
    weight = random(outputs, inputs, dtype=dtype, scale=inputs**-0.5, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if kind == "bias" else None
    named = {"gated": kind == "gated", "in_parts": kind == "parts", "dtype": dtype}
    if fp8:
        numbers, scale = quantize_rows(weight)
        weight = numbers.float() * scale[:, None]
        layer = Product(numbers, bias, scale, **named)
    else:
        layer = Product(weight, bias, **named)
    for rows in ROWS:
        x = random(rows, inputs, dtype=dtype)

        def formula(at, x=x):
            result = x.to(at) @ weight.to(at).T + (0 if bias is None else bias.to(at))
            return reference.silu_and_mul(result, at) if kind == "gated" else result

        for pdl in (False, True):
            out = layer(x, pdl=pdl)

            out = out.sum(0).to(dtype) if kind == "parts" else out
            assert_no_worse_than(out, formula(torch.float64).float(), formula(dtype), factor=3.0)


def test_all_numbers_of_fp8_are_converted_exactly():
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    numbers = numbers[~numbers.isnan()].repeat(2)[:256].repeat(64, 1)
    scale = torch.ones(64, device="cuda")
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.eye(256, dtype=dtype, device="cuda")
        for rows in (slice(16), slice(256)):
            found = Product(numbers, None, scale, dtype=dtype)(x[rows], pdl=True)

            assert torch.equal(found, numbers.to(dtype).T[rows])


@pytest.mark.parametrize("kind", ["plain", "gated", "parts"])
def test_a_row_does_not_depend_on_the_other_rows(kind):
    weight = random(1024, 1024, scale=1 / 32, seed=1)
    layer = Product(weight, gated=kind == "gated", in_parts=kind == "parts")
    x, others = random(256, 1024), random(256, 1024, seed=5)
    others[7] = float("nan")
    for rows in (5, 16, 64, 128, 256):
        mixed = others[:rows].clone()
        mixed[3] = x[3]
        alone, among = layer(x[:rows], pdl=True), layer(mixed, pdl=True)

        assert torch.equal(alone[..., 3, :], among[..., 3, :])


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("rows", [8, 64, 256])
def test_dependent_launches_and_graphs_change_no_bit_in_many_repeats(rows, fp8):
    def product(*shape, seed, **named):
        weight = random(*shape, scale=shape[1] ** -0.5, seed=seed)
        if not fp8:
            return Product(weight, **named)
        numbers, scale = quantize_rows(weight)
        return Product(numbers, None, scale, dtype=weight.dtype, **named)

    layers = [
        (
            product(4096, 1024, seed=4 * i),
            product(1024, 4096, seed=4 * i + 1, in_parts=True),
            product(6144, 1024, seed=4 * i + 2, gated=True),
            product(1024, 3072, seed=4 * i + 3, in_parts=True),
        )
        for i in range(6)
    ]
    weight, start, hidden = random(1024, seed=90), random(rows, 1024, seed=91), None

    def compute(pdl):
        nonlocal hidden
        hidden = start.clone()
        normed = hidden
        for wide, output, gate_up, down in layers:
            parts = output(wide(normed, pdl=pdl), pdl=pdl)
            normed = add_rms_norm(hidden, weight, EPS, parts=parts, pdl=pdl)
            parts = down(gate_up(normed, pdl=pdl), pdl=pdl)
            normed = add_rms_norm(hidden, weight, EPS, parts=parts, pdl=pdl)
        return normed

    expected = compute(pdl=False).clone()
    assert expected.isfinite().all()
    for _ in range(REPEATS):
        assert torch.equal(compute(pdl=True), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute(pdl=True)
    for _ in range(REPEATS):
        graph.replay()
        assert torch.equal(found, expected)


def decode(model, rows, dtype, context=70):
    """Return the logits of a decode step of `rows` sequences over a random cache."""
    blocks = -(-context // 16)
    cache = paged.new_cache(model, 256 * blocks, 16, dtype)
    for number, layer in enumerate(cache.layers):
        layer.copy_(random(*layer.shape, seed=number))
    int32 = {"dtype": torch.int32, "device": "cuda"}
    table = torch.randperm(256 * blocks, generator=torch.Generator().manual_seed(rows))
    table = table[: rows * blocks].view(rows, blocks)
    batch = PagedBatch(
        torch.arange(rows + 1, **int32),
        torch.full((rows,), context, **int32),
        table.to(**int32),
        num_tokens=rows,
        max_seqlen_q=1,
        max_seqlen_k=context,
    )
    slots = (table[:, -1] * 16 + (context - 1) % 16).to(**int32)
    ids = torch.arange(rows, device="cuda") * 31 % 1000
    with torch.inference_mode():
        metadata = model.attention.metadata(slots, 16, batch, None)
        positions = torch.full((rows,), context - 1, device="cuda")
        hidden = model.executors.layers.paged(ids, positions, cache, metadata)
        return model.logits(hidden).float()


@pytest.mark.parametrize("rows", [5, 16, 33, 64, 128, 200, 256])
def test_a_step_is_as_accurate_as_with_library_products(rows, monkeypatch):
    config = changed(QWEN, attention_bias=False)
    model, wide = (DecoderLM(config, dtype, "cuda") for dtype in (torch.bfloat16, torch.float32))
    model.init_weights(std=0.02, seed=0)
    wide.load_state_dict(model.state_dict())
    for it in (model, wide):
        it.requires_grad_(requires_grad=False)
        it.reserve_positions(256)
    model.optimize()
    assert 256 in model.row_counts
    found = decode(model, rows, torch.bfloat16)
    again = decode(model, rows, torch.bfloat16)
    monkeypatch.setattr(registry, "most_rows", lambda *_, **__: 0)
    model.optimize()
    assert not {16, 32, 64} & set(model.row_counts), "still matrix_linear"
    library, truth = decode(model, rows, torch.bfloat16), decode(wide, rows, torch.float32)

    assert torch.equal(found, again)
    assert float((found - truth).abs().max()) <= 1.5 * float((library - truth).abs().max())
