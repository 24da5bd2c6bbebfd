"""FP8 weights on a GPU: accuracy of layers and models, and tokens of the engine."""

import dataclasses
import gc

import pytest
import torch

import kernels
from benchmarks.local_engine import LocalEngine
from kernels.fp8 import quantize_rows
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import LIBRARY_FP8
from kernels.linear.select import select_linear
from kernels.linear.tuned import tuned_linear
from kernels.linear.weights import Norm
from kernels.norms.gpu import quantize_rows as fused
from kernels.rope.registry import TRITON
from kernels.weight_format import FP8_ROWS
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.hub.resolve import BUNDLED, resolve
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from tests.kernels.linear.layer import linear
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than
from tests.kernels.references.reference_fp8 import dequantize_rows
from tests.model.executors import paged
from tests.model.executors.paged import PagedDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

DEVICE = "cuda"
FOLDER = resolve(BUNDLED)
EPS = 1e-6
SHAPES = [
    (4096, 1024, False, "norm"),
    (1024, 2048, False, "residual"),
    (3072, 1024, True, "norm"),
    (4096, 14336, False, "residual"),
    (1008, 576, False, "bias"),
    (1001, 584, False, "residual"),
]


def random(*shape, dtype=torch.bfloat16, scale=1.0, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, device=DEVICE, generator=generator) * scale).to(dtype)


class Layer:
    """A linear layer with FP8 weights, computed by the kernel selected for the number of rows."""

    def __init__(self, outputs, inputs, dtype, *, gated, around):
        shape = ((1 + gated) * outputs, inputs)
        weight = random(*shape, dtype=torch.float32, scale=inputs**-0.5, seed=1)
        self.weight, self.scale = quantize_rows(weight)
        self.bias = random(len(weight), dtype=dtype) if around == "bias" else None
        self.norm = None
        if around == "norm":
            self.norm = Norm(random(inputs, dtype=dtype, seed=2), EPS)
        name = str(dtype).removeprefix("torch.")
        self.problem = LinearProblem(1, outputs, inputs, name, gated, FP8_ROWS)

    def choose(self, rows):
        problem = dataclasses.replace(self.problem, rows=rows)
        return select_linear(problem, kernels.detect(DEVICE), tuned_linear)

    def __call__(self, x, residual=None, *, pdl):
        return linear(
            x, self.weight, self.choose(len(x)), residual,
            bias=self.bias, scale=self.scale, norm=self.norm, residual=residual, pdl=pdl,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17, 256])
@pytest.mark.parametrize(("outputs", "inputs", "gated", "around"), SHAPES)
def test_a_layer_agrees_with_its_formula(dtype, rows, outputs, inputs, gated, around):
    layer = Layer(outputs, inputs, dtype, gated=gated, around=around)
    x = random(rows, inputs, dtype=dtype)
    residual = random(rows, outputs, dtype=dtype, seed=3) if around == "residual" else None
    in_fp8 = layer.choose(rows).spec is LIBRARY_FP8

    def formula(at):
        values = reference.rms_norm(x, layer.norm.weight, EPS, at) if layer.norm else x.to(at)
        if in_fp8:
            values = reference.dequantize(*reference.quantize(values)).to(at)
        weight = dequantize_rows(layer.weight, layer.scale, torch.float32).to(at)
        result = values @ weight.T + (0 if layer.bias is None else layer.bias.to(at))
        result = reference.silu_and_mul(result, at) if gated else result
        return result if residual is None else result + residual.to(at)

    truth = formula(torch.float64).float()
    # After a norm, a value near a tie may round to either FP8 neighbour; and tensor cores truncate FP8 sums.
    share = (0.02 if layer.norm else 0.003) if in_fp8 else 0.0
    slack = 1e-5 + share * float(truth.abs().max())
    for pdl in (False, kernels.detect(DEVICE).sm >= 90):
        out = layer(x, None if residual is None else residual.clone(), pdl=pdl)

        assert_no_worse_than(out, truth, formula(dtype), factor=3.0, atol=slack)


def test_the_quantize_kernel_agrees_with_pytorch():
    if kernels.detect(DEVICE).sm < 89:
        pytest.skip("no FP8 matrix products before sm_89")
    rows = random(99, 4096) * torch.logspace(-30, 4, 99, device=DEVICE)[:, None]

    numbers, scales = fused.quantize_rows(rows.bfloat16())

    wanted, wanted_scales = quantize_rows(rows.bfloat16())
    torch.testing.assert_close(scales[:, 0], wanted_scales)
    assert (numbers.view(torch.uint8) == wanted.view(torch.uint8)).float().mean() > 0.99


@pytest.mark.parametrize("rows", [4, 64])
def test_a_row_does_not_depend_on_its_neighbours(rows):
    layer = Layer(4096, 1024, torch.bfloat16, gated=False, around="norm")
    x = random(rows, 1024)
    out = layer(x, pdl=False)

    assert torch.equal(layer(torch.cat((x[:1], 50 * x[1:])), pdl=False)[0], out[0])


@pytest.fixture
def blocks_of_16(monkeypatch):
    """Use a block size that the Hopper kernels support."""
    monkeypatch.setattr(paged, "BLOCK_SIZE", 16)


def drive(dtype, weight_format, *, fuse):
    """Return the logits of the last token of each sequence and step, float32."""
    config = ModelConfig.from_folder(FOLDER)
    model = load_model(FOLDER, config, dtype, DEVICE, weight_format=weight_format, pack=fuse)
    assert (model.executors.layers.bound.rotation is TRITON) == fuse
    driver, generator = PagedDriver(model), torch.Generator().manual_seed(1)
    rows = []
    for count in (17, 1, 4, 17):
        length = 1 if rows else 20
        token_ids = torch.randint(5, 500, (17, length), generator=generator).tolist()
        found = driver.step({name: token_ids[name] for name in range(count)})
        rows += [found[name][-1].float() for name in range(count)]
    return torch.stack(rows)


def test_packed_layers_in_float32_agree_with_separate_operations(blocks_of_16):
    expected = drive(torch.float32, FP8_ROWS, fuse=False)

    found = drive(torch.float32, FP8_ROWS, fuse=True)

    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_packed_layers_in_bfloat16_add_little_to_the_error_of_fp8_weights(blocks_of_16):
    truth = drive(torch.float32, None, fuse=False)
    weights = drive(torch.float32, FP8_ROWS, fuse=False)

    found = drive(torch.bfloat16, FP8_ROWS, fuse=True)

    distance, allowed = ((x - truth).square().mean().sqrt() for x in (found, weights))
    assert float(distance) < 3 * float(allowed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recorded_steps_give_the_tokens_of_steps_without_graphs(dtype):
    prompts = [[(7 * i + j) % 500 + 5 for j in range(3 + 13 * i)] for i in range(16)]
    sampling = SamplingParams(max_new_tokens=64, temperature=0.0)
    found = []
    for graphs in (False, True):
        engine = LocalEngine(
            EngineConfig(
                model_path=str(FOLDER),
                model_id=BUNDLED,
                device=DEVICE,
                dtype=dtype,
                quantization="fp8",
                kv_cache_tokens=40960,
                max_num_seqs=24,
                max_num_batched_tokens=2048,
                cuda_graphs=graphs,
            )
        )
        while engine.engine._runner.use_idle_time():
            pass
        info = engine.engine.info
        assert (info.quantization, info.plan.weight_dtype) == ("fp8", "float8_e4m3fn")
        asked = [
            GenerateRequest(request_id=i, prompt_token_ids=prompt, sampling=sampling)
            for i, prompt in enumerate(prompts)
        ]
        found.append([[e.token_id for e in events] for events in engine.generate(asked)])
        del engine
        gc.collect()
        torch.cuda.empty_cache()

    assert found[0] == found[1]
