"""Layers with few launches against the same layers operation by operation, in Triton's interpreter."""

import dataclasses
import random

import pytest
import torch

import kernels
import kernels.linear.projection
import model.network.decoder
import model.network.layers
from kernels.arch import CATALOGUE, CPU
from kernels.linear.matrix import MatrixLayer
from kernels.linear.projection import objection
from kernels.linear.select import LinearChoice, LinearKernel, LinearLaunch
from model.checkpoint.config import ModelConfig, RopeConfig
from model.network.decoder import DecoderLM
from tests.kernels import float8_library, triton_interpreter
from tests.model.network.paged import PagedDriver
from tests.model.network.test_fp8_weights import both_in_float8

SHAPE = {
    "architecture": "LlamaForCausalLM",
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": {"num_layers": 2},
    "llama tied": {"tie_word_embeddings": True},
    "llama biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "qwen2": {"attention_bias": True, "num_heads": 3, "num_kv_heads": 1},
    "qwen3": {"qk_norm": True},
    "mistral": {"sliding_window": 3, "num_kv_heads": 2},
    "layers of both kinds": {
        "sliding_window": 2,
        "num_layers": 2,
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "yarn": {
        "rope": RopeConfig(
            "yarn", factor=4.0, original_max_positions=32, attention_factor=1.1, beta_fast=8.0
        )
    },
    "sizes that no vector divides": {"hidden_size": 36, "intermediate_size": 18, "vocab_size": 23},
}
H100 = CATALOGUE["h100"]
FP8 = torch.float8_e4m3fn


def build(weight_dtype=None, dtype=torch.float32, **changes):
    made = DecoderLM(ModelConfig(**SHAPE | changes), dtype, weight_dtype=weight_dtype)
    made.init_weights(std=0.15, seed=0)
    # What a seed draws in float16 differs between PyTorch's versions.
    single = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dtype is torch.float16 and parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=single) * 0.15)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(2))
    return made


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Choose the kernels of a GPU, with tensors of the CPU; in few programs, which is what takes the time here."""

    def wide(problem, _arch):
        launch = LinearLaunch(32, 256, 1)
        return LinearChoice(problem, LinearKernel.VECTOR, launch, "for the test")

    def detect(_device=None):
        return dataclasses.replace(H100, num_sms=8)  # a decode has as many splits

    def switch():
        monkeypatch.setattr(kernels, "detect", detect)
        monkeypatch.setattr(model.network.decoder, "detect", detect)
        monkeypatch.setattr(kernels.linear.projection, "tuned_linear", wide)

    kernels.linear.projection._choose.cache_clear()
    yield switch
    kernels.linear.projection._choose.cache_clear()


def drive(made, decoded, cache_dtype=None):
    """Feed prompts, then tokens of as many sequences as `decoded` says; returns all logits."""
    driver, rng = PagedDriver(made, cache_dtype=cache_dtype), random.Random(3)

    def draw(count):
        return [rng.randrange(23) for _ in range(count)]

    found = [driver.step({name: draw(1 + name) for name in range(3)})]
    found += [driver.step({name: draw(1) for name in range(count)}) for count in decoded]
    found.append(driver.step({0: draw(1), 1: draw(3)}))
    return [step[name] for step in found for name in sorted(step)]


@triton_interpreter.interpreted
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_and_tokens_of_its_operations(family, on_a_gpu):
    plain = build(**FAMILIES[family])
    expected = drive(plain, (1, 3))
    on_a_gpu()
    fused = build(**FAMILIES[family])

    assert fused.fuse() == ""
    with triton_interpreter.poisoned_memory():
        found = drive(fused, (1, 3))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


class Product:
    """Stands in for a product on the tensor cores, which no interpreter has."""

    def __init__(self, linear, splits=0):
        self.linear, self.splits = linear, splits

    def __call__(self, x, *, pdl):
        assert not pdl
        weight, bias = self.linear.weight, self.linear.bias
        if self.splits:
            pairs = zip(x.chunk(self.splits, -1), weight.chunk(self.splits, -1), strict=True)
            return torch.stack([part @ columns.T for part, columns in pairs])
        out = x @ weight.T if bias is None else x @ weight.T + bias
        return kernels.silu_and_mul(out) if self.linear.gated else out


@triton_interpreter.interpreted
@pytest.mark.parametrize("family", ["llama", "qwen3", "qkv bias"])
def test_layers_on_the_tensor_cores_are_chained_as_their_operations(family, on_a_gpu):
    changes = {"attention_bias": True} if family == "qkv bias" else FAMILIES[family]
    expected = drive(build(**changes), (3,))
    on_a_gpu()
    fused = build(**changes)
    fused.fuse()

    layers = fused._fused
    layers._matrix_rows = 64
    layers._matrix = [
        MatrixLayer(
            Product(ops.qkv), Product(ops.output, 2), Product(ops.gate_up), Product(ops.down, 4)
        )
        for ops in layers._ops
    ]
    assert layers.row_counts == (2, 4, 16, 32, 64)
    found = drive(fused, (3,))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@triton_interpreter.interpreted
def test_weights_that_are_fetched_ahead_change_nothing(on_a_gpu):
    on_a_gpu()
    fused = build(num_layers=2)
    fused.fuse()
    expected = drive(fused, (1,))

    fused._fused._fetches = True

    for ours, theirs in zip(drive(fused, (1,)), expected, strict=True):
        assert torch.equal(ours, theirs)


@triton_interpreter.interpreted
def test_a_cache_in_float8_takes_the_keys_and_values_of_the_operations(on_a_gpu):
    expected = drive(build(qk_norm=True), (3,), torch.float8_e4m3fn)
    on_a_gpu()
    fused = build(qk_norm=True)
    fused.fuse()

    for ours, theirs in zip(drive(fused, (3,), torch.float8_e4m3fn), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@triton_interpreter.interpreted
@pytest.mark.parametrize("family", ["llama biases", "qwen3", "sizes that no vector divides"])
def test_weights_in_float8_have_the_logits_of_their_operations(family, on_a_gpu):
    expected = drive(build(FP8, **FAMILIES[family]), (1, 3))
    on_a_gpu()
    fused = build(FP8, **FAMILIES[family])

    assert fused.fuse() == ""
    with triton_interpreter.poisoned_memory():
        found = drive(fused, (1, 3))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@triton_interpreter.interpreted
def test_many_rows_are_rounded_to_float8_as_the_weights_are(on_a_gpu, monkeypatch):
    """In half precision, the only one that the library multiplies in FP8; a step of 6 rows, and one of 4."""
    weight_only = drive(build(FP8, torch.float16, qk_norm=True), ())
    monkeypatch.setattr(model.network.layers, "quantised_linear", both_in_float8)
    both = drive(build(FP8, torch.float16, qk_norm=True), ())
    float8_library.provide(monkeypatch)
    on_a_gpu()
    fused = build(FP8, torch.float16, qk_norm=True)
    fused.fuse()

    found = drive(fused, ())

    def distance(ours, theirs):
        return (torch.cat(ours) - torch.cat(theirs)).float().square().mean().sqrt()

    assert distance(found[:3], both[:3]) < 0.3 * distance(weight_only[:3], both[:3])


@triton_interpreter.interpreted
@pytest.mark.parametrize(("rows", "of_a_layer"), [(1, 6), (5, 5)])
def test_a_decoded_token_takes_few_launches(rows, of_a_layer, on_a_gpu, monkeypatch):
    """With more rows four of a layer's launches are the library's, and are not counted here."""
    from triton.runtime import interpreter

    on_a_gpu()
    fused = build(qk_norm=True)
    fused.fuse()
    driver = PagedDriver(fused)
    driver.step({name: [1] for name in range(rows)})
    count = 0
    launch = interpreter.GridExecutor.__call__

    def counted(self, *args, **named):
        nonlocal count
        count += 1
        return launch(self, *args, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    driver.step({name: [3] for name in range(rows)})

    plan, norm, head = 1, 1, rows <= 4
    assert count == plan + of_a_layer * SHAPE["num_layers"] + norm + head


@triton_interpreter.interpreted
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_the_most_likely_tokens_are_those_of_the_logits(rows, fused, on_a_gpu):
    made = build()
    if fused:
        on_a_gpu()
        made.fuse()
    hidden = torch.randn(rows, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(1))
    hidden[-1, 0] = float("nan") if rows > 1 else 0.5
    logits, tokens = torch.empty(rows, SHAPE["vocab_size"]), torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows)

    with torch.no_grad():
        ids = made.most_likely(hidden, logits, tokens, logprobs)
        expected = made.logits(hidden)

    torch.testing.assert_close(logits, expected, equal_nan=True)
    wanted = expected.argmax(-1)
    wanted[expected.isnan().any(-1)] = -1
    assert tokens.tolist() == wanted.tolist()
    truth = torch.log_softmax(logits.double(), -1).amax(-1)[tokens >= 0]
    torch.testing.assert_close(logprobs[tokens >= 0].double(), truth, rtol=1e-5, atol=1e-5)
    assert torch.equal(ids[tokens >= 0], tokens[tokens >= 0])
    assert bool(((ids >= 0) & (ids < SHAPE["vocab_size"])).all())


@triton_interpreter.interpreted
def test_attention_that_no_kernel_takes_is_computed_as_before(on_a_gpu, monkeypatch):
    expected = drive(build(head_dim=16), (1,))
    on_a_gpu()
    fused = build(head_dim=16)
    assert fused.fuse() == ""
    monkeypatch.setattr(fused._fused, "_ops", None)

    for ours, theirs in zip(drive(fused, (1,)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "dtype", "reason"),
    [
        (CPU, torch.float32, "a CPU has no kernels"),
        (CATALOGUE["t4"], torch.float16, "need sm_80, this is sm_75"),
        (H100, torch.float64, "no float64"),
        (H100, torch.bfloat16, ""),
        (CATALOGUE["a100"], torch.float32, ""),
    ],
    ids=str,
)
def test_what_cannot_be_fused_says_why(arch, dtype, reason):
    assert reason in objection(arch, dtype)
    assert bool(objection(arch, dtype)) == bool(reason)


def test_a_model_on_a_cpu_stays_as_it_is():
    plain = build()

    assert "a CPU" in plain.fuse()
    assert plain._fused is None
