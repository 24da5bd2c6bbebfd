"""Matrix products of many rows by persistent programs: accuracy, the bits of other kernels, and bounds."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.gpu.compile_ahead import compile_ahead
from kernels.linear.gpu.matrix import MatrixLinear
from kernels.linear.gpu.persistent import PersistentLinear
from kernels.linear.persistent_tiles import PersistentLaunch, plan_persistent, sized
from kernels.linear.problem import LinearProblem
from kernels.linear.projection import SWIGLU, Norm, Operations, Residual, bind_projection
from kernels.linear.registry import PERSISTENT, REGISTRY
from kernels.linear.weights import LinearArguments
from kernels.norms.gpu.norm_and_gate import add_rms_norm
from kernels.norms.pytorch import sum_in_order
from tests.gpu.test_matrix_gpu import EPS, random
from tests.kernels.linear.weights import linear_weights
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

KINDS = ("plain", "bias", "gated", "residual")
ROWS = (1, 100, 129, 300, 1023, 4095, 4097)
SHAPES = [
    (2048, 1536, "bias"), (1536, 1536, "residual"), (17920, 1536, "gated"), (1536, 8960, "residual"),
    (3072, 2048, "plain"), (16384, 2048, "gated"), (2048, 8192, "residual"),
    (2560, 2048, "plain"), (11264, 2048, "gated"), (2048, 5632, "residual"),
    (4096, 1024, "plain"), (1024, 2048, "residual"), (6144, 1024, "gated"), (1024, 3072, "residual"),
    (12288, 2048, "gated"), (2048, 6144, "residual"),
    (5120, 3072, "plain"), (3072, 3072, "residual"), (3072, 8192, "residual"),
    (6144, 4096, "plain"), (28672, 4096, "gated"), (4096, 14336, "residual"),
    (960, 576, "plain"), (576, 576, "residual"), (3072, 576, "gated"), (576, 1536, "residual"),
    (64, 64, "plain"), (192, 320, "bias"), (128, 64, "gated"), (64, 64, "residual"), (1600, 320, "gated"),
]  # fmt: skip
LAUNCHES = [
    PersistentLaunch(128, 256),
    PersistentLaunch(128, 256, stages=3, skew=0, group=1),
    PersistentLaunch(128, 256, stages=4, skew=1, group=3),
    PersistentLaunch(128, 128, stages=5, skew=2),
    PersistentLaunch(128, 128, stages=2, skew=0),
    PersistentLaunch(128, 64, stages=6, skew=3),
    PersistentLaunch(256, 128, stages=3),
    PersistentLaunch(256, 64, stages=3, skew=1),
]
REPEATS = 30


@pytest.fixture(autouse=True)
def on_hopper():
    if kernels.detect("cuda").sm != 90:
        pytest.skip("the kernel needs sm_90")


def problem(weight, kind, **more):
    gated = kind == "gated"
    return LinearProblem(
        1,
        len(weight) // (1 + gated),
        weight.shape[1],
        str(weight.dtype).removeprefix("torch."),
        gated=gated,
        bias=kind == "bias",
        residual=kind == "residual",
        layer_weights=1,
        **more,
    )


def make(outputs, inputs, kind, kernel=PersistentLinear, dtype=torch.bfloat16, **more):
    """Return a projection with random weights, and them."""
    weight = random(outputs, inputs, dtype=dtype, scale=inputs**-0.5, seed=1)
    bias = random(outputs, dtype=dtype, seed=2) if kind == "bias" else None
    return kernel(linear_weights(weight, bias), problem(weight, kind, **more)), weight, bias


def call(layer, x, *, pdl=True):
    return layer(x, None, None, LinearArguments(pdl=pdl))


def compiled(layer, x):
    """Compile the kernels of all `LAUNCHES` in parallel; return these with their stages."""
    launches = [sized(launch, layer._problem) for launch in LAUNCHES]
    with compile_ahead():
        for launch in launches:
            layer.run(x, launch, pdl=True)
    return launches


def judge(out, x, weight, bias, kind):
    """Compare a result with the formula in float32 and in the dtype of the input."""
    if kind == "residual":
        out = out.sum(0).to(x.dtype)

    def formula(at):
        result = x.to(at) @ weight.to(at).T
        if bias is not None:
            result += bias.to(at)
        return reference.silu_and_mul(result, at) if kind == "gated" else result

    assert_no_worse_than(out, formula(torch.float32), formula(x.dtype), factor=3.0)


@pytest.mark.parametrize(("outputs", "inputs", "kind"), SHAPES)
def test_a_layer_agrees_with_its_formula(outputs, inputs, kind):
    layer, weight, bias = make(outputs, inputs, kind)
    with compile_ahead():
        for rows in ROWS:
            call(layer, random(rows, inputs), pdl=rows % 2 == 0)
    for rows in ROWS:
        x = random(rows, inputs)

        judge(call(layer, x, pdl=rows % 2 == 0), x, weight, bias, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_float16_agrees_with_the_formula(kind):
    layer, weight, bias = make(1152, 832, kind, dtype=torch.float16)
    for rows in ROWS:
        x = random(rows, 832, dtype=torch.float16)

        judge(call(layer, x), x, weight, bias, kind)


@pytest.mark.parametrize("num_sms", [1, 7, 132])
@pytest.mark.parametrize("kind", KINDS)
def test_all_tile_sizes_and_numbers_of_programs_give_the_same_bits(kind, num_sms):
    layer, weight, bias = make(1216, 704, kind)
    layer._num_sms = num_sms
    x = random(1000, 704)
    expected = None
    for launch in compiled(layer, x):
        out = layer.run(x, launch, pdl=True)
        if expected is None:
            judge(out, x, weight, bias, kind)
            expected = out

        assert torch.equal(out, expected), launch


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("short", [64, 128, 192, 256, 320])
def test_layers_with_as_many_chunks_as_stages_or_fewer(kind, short):
    layer, weight, bias = make(640, short, kind)
    x = random(700, short)
    launches = compiled(layer, x)
    for num_sms in (1, 3, 132):
        layer._num_sms = num_sms
        for launch in launches:
            out = layer.run(x, launch, pdl=True)

            judge(out, x, weight, bias, kind)


@pytest.mark.parametrize(
    ("outputs", "inputs", "kind"),
    [
        (4096, 1024, "plain"),
        (2048, 1536, "bias"),
        (6144, 1024, "gated"),
        (17920, 1536, "gated"),
        (1024, 2048, "residual"),
        (1024, 3072, "residual"),
        (1536, 8960, "residual"),
        (4096, 14336, "residual"),
        (576, 1536, "residual"),
        (192, 320, "plain"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_batch_invariant_layer_has_the_bits_of_the_kernel_for_few_rows(
    outputs, inputs, kind, dtype
):
    given = (outputs, inputs, kind)
    few = make(*given, MatrixLinear, dtype, batch_invariant=True)[0]
    many = make(*given, PersistentLinear, dtype, batch_invariant=True)[0]
    x = random(4097, inputs, dtype=dtype)
    expected = call(few, x)
    if kind == "residual":
        expected = sum_in_order(expected)[None]
    for rows in (1, 5, 64, 129, 256, 257, 300, 512, 1000, 2049, 4097):
        found, alone = call(many, x[:rows]), call(few, x[:rows])

        assert torch.equal(found, expected[..., :rows, :]), rows
        alone = sum_in_order(alone)[None] if kind == "residual" else alone
        assert torch.equal(alone, expected[..., :rows, :]), rows


def test_a_norm_adds_merged_sums_and_their_parts_with_the_same_bits():
    few = make(1024, 3072, "residual", MatrixLinear, batch_invariant=True)[0]
    many = make(1024, 3072, "residual", batch_invariant=True)[0]
    x, start, weight = random(300, 3072), random(300, 1024, seed=7), random(1024, seed=8)
    results = []
    for layer in (few, many):
        hidden = start.clone()
        normed = add_rms_norm(hidden, weight, EPS, parts=call(layer, x))
        results.append((hidden, normed))
    assert len(call(few, x)) > len(call(many, x)) == 1

    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_rows_up_to_300_has_the_same_bits(kind):
    layer = make(704, 448, kind, batch_invariant=True)[0]
    x = random(300, 448)
    whole = call(layer, x)
    for rows in range(1, 300):
        assert torch.equal(call(layer, x[:rows]), whole[..., :rows, :]), rows


@pytest.mark.parametrize("kind", ["plain", "bias", "gated"])
def test_only_the_rows_of_the_input_are_read_and_only_the_output_is_written(kind):
    layer, weight, bias = make(704, 448, kind)
    width = 704 // (1 + (kind == "gated"))
    for rows in (1, 63, 65, 127, 129, 300):
        x, out = random(rows + 200, 448), random(rows + 200, width, seed=3)
        x[rows:] = float("nan")
        rest = out[rows:].clone()
        launch = plan_persistent(layer._problem, 1024)
        layer.run(x[:rows], launch, out[:rows], pdl=False)

        judge(out[:rows], x[:rows], weight, bias, kind)
        assert torch.equal(out[rows:], rest)


def test_dependent_launches_and_graphs_change_no_bit_in_many_repeats():
    shapes = {"plain": (4096, 1024), "gated": (6144, 1024)}
    wide, gate_up = (make(*shapes[kind], kind)[0] for kind in shapes)
    output, down = (make(1024, inputs, "residual")[0] for inputs in (4096, 3072))
    weight = random(1024, seed=90)
    for rows in (130, 256, 1500):
        start = random(rows, 1024, seed=91)

        def compute(pdl, start=start):
            hidden = start.clone()
            normed = hidden
            for _ in range(4):
                parts = call(output, call(wide, normed, pdl=pdl), pdl=pdl)
                normed = add_rms_norm(hidden, weight, EPS, parts=parts, pdl=pdl)
                parts = call(down, call(gate_up, normed, pdl=pdl), pdl=pdl)
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


def test_a_projection_of_a_prompt_uses_the_kernel_and_agrees_with_the_library(monkeypatch):
    weight = random(6144, 1024, scale=1 / 32, seed=1)
    norm = Norm(random(1024, seed=2), EPS)
    x = random(2048, 1024)

    def compute():
        operations = Operations(norm, SWIGLU)
        layer = bind_projection(
            linear_weights(weight), weight.dtype, kernels.detect("cuda"), operations, layer_weights=1 << 20
        )  # fmt: skip
        return layer.from_residual(Residual(x.clone()))[0], layer

    found, layer = compute()
    assert layer._choose(2048)[0].spec is PERSISTENT
    assert 2048 in layer.row_counts
    monkeypatch.setattr(
        "kernels.linear.select.REGISTRY", [it for it in REGISTRY if it is not PERSISTENT]
    )
    library, layer = compute()
    assert layer._choose(2048)[0].spec is not PERSISTENT
    normed = reference.rms_norm(x, norm.weight, EPS, torch.float32)
    truth = reference.silu_and_mul(normed @ weight.float().T, torch.float32)

    assert_no_worse_than(found, truth, library, factor=1.5)
