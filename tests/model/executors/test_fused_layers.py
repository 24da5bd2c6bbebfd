"""Compares fused layers with the same layers computed operation by operation, in Triton's interpreter."""

import dataclasses
import random
import sys
from unittest import mock

import pytest
import torch

import kernels
import kernels.linear.projection
import kernels.linear.registry
import kernels.linear.select
import model.network.parameters
from kernels.arch import CATALOGUE, CPU
from kernels.collective.communicator import AbsentRanks
from kernels.linear.pytorch import PyTorchLinear
from kernels.linear.registry import MATRIX
from kernels.linear.select import LinearLaunch, TunedLinear
from kernels.rope.registry import PYTORCH, TRITON
from kernels.selection import VectorProblem, triton_unsupported
from kernels.weight_format import FP8_ROWS, WeightFormat
from model.decoder import DecoderLM
from model.network.spec import Rotary
from tests.kernels import float8_library, triton_interpreter
from tests.model.configs import model_config
from tests.model.executors.paged import PagedDriver
from tests.model.executors.test_fp8_weights import both_in_float8

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
GEMMA = {
    "activation": "gelu_tanh",
    "norms_add_one": True,
    "post_norms": True,
    "scale_embeddings": True,
    "query_pre_attn_scalar": 20,
    "logit_softcap": 2.0,
}
UNNORMED = "layers without norms"
PARALLEL = "attention and MLP in parallel"
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
        "rope": Rotary(
            "yarn", factor=4.0, original_max_positions=32, attention_factor=1.1, beta_fast=8.0
        )
    },
    "sizes that no vector divides": {"hidden_size": 36, "intermediate_size": 18, "vocab_size": 23},
    "gpt2": {
        "architecture": "GPT2LMHeadModel",
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "rope": None,
        "num_kv_heads": 2,
        "tie_word_embeddings": True,
    }
    | dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True),
    "opt": {
        "architecture": "OPTForCausalLM",
        "norm": "layer",
        "activation": "relu",
        "gated_mlp": False,
        "rope": None,
        "position_offset": 2,
    },
    "stablelm": {
        "architecture": "StableLmForCausalLM",
        "norm": "layer",
        "attention_bias": True,
        "rope": Rotary(dims=8),
    },
    "olmo2": {
        "architecture": "Olmo2ForCausalLM",
        "joint_qk_norm": True,
        "pre_norms": False,
        "post_norms": True,
        "num_layers": 2,
    },
    UNNORMED: {"pre_norms": False, "num_layers": 2},
    "gpt_neox": {
        "architecture": "GPTNeoXForCausalLM",
        "norm": "layer",
        "activation": "gelu",
        "gated_mlp": False,
        "rope": Rotary(dims=8),
        "parallel": True,
        "num_layers": 2,
    }
    | dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), True),
    "gptj": {
        "architecture": "GPTJForCausalLM",
        "norm": "layer",
        "activation": "gelu_tanh",
        "gated_mlp": False,
        "mlp_bias": True,
        "num_layers": 2,
    }
    | dict.fromkeys(("parallel", "shared_norm", "head_bias"), True),
    "cohere": {
        "architecture": "CohereForCausalLM",
        "norm": "layer",
        "norm_bias": False,
        "parallel": True,
        "shared_norm": True,
        "num_layers": 2,
        "tie_word_embeddings": True,
    },
    "norms by head": {"qk_norm_by_head": True, "num_layers": 2},
    PARALLEL: {"parallel": True, "num_layers": 2},
    "phi3": {
        "architecture": "Phi3ForCausalLM",
        "sliding_window": 3,
        "rope": Rotary(
            "longrope",
            original_max_positions=32,
            attention_factor=1.2,
            short_factor=(1.0,) * 12,
            long_factor=tuple(1.0 + 0.25 * i for i in range(12)),
            dims=24,
        ),
    },
    "smollm3": {
        "architecture": "SmolLM3ForCausalLM",
        "num_layers": 2,
        "sliding_window": 64,
        "rope": None,
        "local_rope": Rotary(),
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "gemma2": GEMMA | {"architecture": "Gemma2ForCausalLM", "attention_softcap": 1.0},
    "gemma3": GEMMA
    | {
        "architecture": "Gemma3ForCausalLM",
        "qk_norm": True,
        "local_rope": Rotary(theta=100.0),
        "sliding_window": 2,
        "num_layers": 2,
        "layer_types": ("sliding_attention", "full_attention"),
    },
}
H100 = CATALOGUE["h100"]
NOT_READ = WeightFormat("blocks that no kernel reads", 8, group=12, scales="block")
LOAD = kernels.linear.projection.load


def build(weight_format=None, dtype=torch.float32, communicator=None, **changes):
    config = model_config(**SHAPE | changes)
    made = DecoderLM(config, dtype, weight_format=weight_format, communicator=communicator)
    made.init_weights(std=0.15, seed=0)
    # Random numbers of a seed in float16 differ between PyTorch versions.
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
    """Select GPU kernels for CPU tensors, with few programs, because the interpreter's time grows with their number."""

    def wide(_problem, _arch):
        return TunedLinear("vector", LinearLaunch(32, 256, 1), "for the test")

    def detect(_device=None):
        return dataclasses.replace(H100, num_sms=8)  # limits the splits of a decode

    def switch():
        monkeypatch.setattr(kernels.attention.functional, "detect", detect)
        monkeypatch.setattr(model.network.parameters, "detect", detect)
        monkeypatch.setattr(kernels.linear.projection, "tuned_linear", wide)

    return switch


def optimized(*arguments, **changes):
    made = build(*arguments, **changes).requires_grad_(requires_grad=False)
    made.optimize()
    assert made.executors.layers.bound.rotation is TRITON
    return made


def drive(made, decoded, cache_dtype=None):
    """Run prompts, then a decode step for each number of sequences in `decoded`; return all logits."""
    driver, rng = PagedDriver(made, cache_dtype=cache_dtype), random.Random(3)

    def tokens(count):
        return [rng.randrange(23) for _ in range(count)]

    found = [driver.step({name: tokens(1 + name) for name in range(3)})]
    found += [driver.step({name: tokens(1) for name in range(count)}) for count in decoded]
    found.append(driver.step({0: tokens(1), 1: tokens(3)}))
    return [step[name] for step in found for name in sorted(step)]


@triton_interpreter.interpreted
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_match_the_logits_and_tokens_of_separate_operations(family, on_a_gpu):
    plain = build(**FAMILIES[family])
    expected = drive(plain, (1, 3))
    on_a_gpu()
    fused = optimized(**FAMILIES[family])

    with triton_interpreter.poisoned_memory():
        found = drive(fused, (1, 3))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@triton_interpreter.interpreted
def test_fused_layers_of_gemma_in_bfloat16_have_norm_weights_in_float32(on_a_gpu):
    half = {"dtype": torch.bfloat16, **FAMILIES["gemma3"]}
    expected = drive(build(**half), (1, 3))
    on_a_gpu()
    fused = optimized(**half)

    found = drive(fused, (1, 3))

    assert fused.decoder_layers[0].input_norm.dtype is torch.float32
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


class Product:
    """Fake of a tensor-core projection, which cannot be interpreted; output and down return partial sums."""

    def __init__(self, weights, problem):
        self.weights, self.problem = weights, problem

    def __call__(self, x, choice, out, arguments):
        weight, bias = self.weights.weight.numbers, self.weights.bias
        assert out is None
        assert set(arguments[:3]) == {None}
        assert len(x) <= 64
        if self.problem.residual:
            pairs = zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)
            return torch.stack([part @ columns.T for part, columns in pairs])
        y = x @ weight.T if bias is None else x @ weight.T + bias
        return kernels.silu_and_mul(y) if self.problem.gated else y


@triton_interpreter.interpreted
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "qkv bias", "llama biases", "gpt2", "gemma3", "olmo2", "gptj", "cohere"],
)
def test_tensor_core_projections_match_separate_operations(family, on_a_gpu, monkeypatch):
    """With a bias and a gate or the residual stream, the library computes a projection."""
    changes = {"attention_bias": True} if family == "qkv bias" else FAMILIES[family]
    expected = drive(build(**changes), (3,))
    on_a_gpu()
    products = []

    def unsupported(problem, _arch):
        odd = problem.bias and (problem.gated or problem.residual)
        return ("for the test",) * bool(odd or problem.trainable or not problem.layer_weights)

    def load(target):
        products.append(target)
        return Product if target == "matrix" else LOAD(target)

    matrix = dataclasses.replace(MATRIX, target="matrix", limits=unsupported)
    rows = (matrix, *(row for row in kernels.linear.registry.REGISTRY if row is not MATRIX))
    monkeypatch.setattr(kernels.linear.select, "REGISTRY", rows)
    monkeypatch.setattr(kernels.linear.projection, "REGISTRY", rows)
    monkeypatch.setattr(kernels.linear.projection, "load", load)
    fused = optimized(**changes)

    found = drive(fused, (3,))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    layers = SHAPE["num_layers"] if "num_layers" not in changes else changes["num_layers"]
    assert products.count("matrix") == layers * {"llama biases": 1, "gpt2": 2, "gptj": 3}.get(
        family, 4
    )
    assert fused.row_counts == (1, 2, 4, 16, 32, 64, 128, 256)


class OneRank(AbsentRanks):
    """The only rank of a model; the sum and the norm take one launch, or two."""

    def __init__(self, *, one_launch):
        super().__init__(1)
        self.launches = 0

        from kernels.collective import one_shot

        def share_memory(num_bytes, _device):
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
            return memory, [memory.data_ptr()]

        with (
            mock.patch.object(one_shot, "share_memory", share_memory),
            mock.patch.object(one_shot, "detect", return_value=H100),
        ):
            self.one_shot = one_shot.OneShotSum(0, 1, torch.device("cpu")) if one_launch else None
        self.fuses_norm = one_launch

    def add_and_normalize(self, parts, hidden, weight, eps, *, pdl):
        if self.one_shot is None or not self.one_shot.normalizes(hidden):
            return None
        self.launches += 1
        return self.one_shot.add_and_normalize(parts, hidden, weight, eps, pdl=pdl)


@triton_interpreter.interpreted
@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize(
    "family",
    ["llama", "llama biases", "opt", "gemma3", "olmo2", UNNORMED, "gptj", "cohere", PARALLEL],
)
def test_sums_of_ranks_match_separate_operations(family, one_launch, on_a_gpu):
    """Layer norms, biases and norms of the sum follow it in launches of their own."""
    expected = drive(build(**FAMILIES[family]), (1, 3))
    on_a_gpu()
    rank = OneRank(one_launch=one_launch)
    shared = optimized(communicator=rank, **FAMILIES[family])

    found = drive(shared, (1, 3))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert bool(rank.launches) == (one_launch and family in ("llama", UNNORMED, PARALLEL))


@triton_interpreter.interpreted
def test_prefetching_weights_does_not_change_the_logits(on_a_gpu, monkeypatch):
    on_a_gpu()
    fused = optimized(num_layers=2)
    expected = drive(fused, (1,))
    rope_cache = sys.modules["kernels.rope.gpu.rope_cache"]
    rope_and_write_kv, fetched = rope_cache.rope_and_write_kv, []

    def fetching(*arguments, ahead, **more):
        assert (
            ahead is None
        )  # only kernels with dependent launch prefetch, and the interpreter has none
        fetched.append(fused.layers[0].output)
        weights = fused.executors.layers.bound.layers[0].mixer.next_weights
        return rope_and_write_kv(*arguments, ahead=weights, **more)

    monkeypatch.setattr(rope_cache, "rope_and_write_kv", fetching)

    for ours, theirs in zip(drive(fused, (1,)), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert fetched


@triton_interpreter.interpreted
def test_a_float8_cache_receives_the_keys_and_values_of_separate_operations(on_a_gpu):
    expected = drive(build(qk_norm=True), (3,), torch.float8_e4m3fn)
    on_a_gpu()
    fused = optimized(qk_norm=True)

    for ours, theirs in zip(drive(fused, (3,), torch.float8_e4m3fn), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@triton_interpreter.interpreted
@pytest.mark.parametrize(
    "family", ["llama biases", "qwen3", "sizes that no vector divides", "gpt2", "gemma3", "olmo2"]
)
@pytest.mark.parametrize("form", [FP8_ROWS, NOT_READ], ids=lambda form: form.name)
def test_quantized_weights_match_the_logits_of_separate_operations(family, form, on_a_gpu):
    expected = drive(build(form, **FAMILIES[family]), (1, 3))
    on_a_gpu()
    fused = optimized(form, **FAMILIES[family])

    with triton_interpreter.poisoned_memory():
        found = drive(fused, (1, 3))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@triton_interpreter.interpreted
def test_activations_of_many_rows_are_quantized_to_float8(on_a_gpu, monkeypatch):
    """In half precision, the only one with an FP8 product in the library; with steps of 6 and of 4 rows."""
    weight_only = drive(build(FP8_ROWS, torch.float16, qk_norm=True), ())
    with monkeypatch.context() as patch:
        patch.setattr(PyTorchLinear, "__call__", both_in_float8)
        both = drive(build(FP8_ROWS, torch.float16, qk_norm=True), ())
    float8_library.provide(monkeypatch)
    on_a_gpu()
    fused = optimized(FP8_ROWS, torch.float16, qk_norm=True)

    found = drive(fused, ())

    def distance(ours, theirs):
        return (torch.cat(ours) - torch.cat(theirs)).float().square().mean().sqrt()

    assert distance(found[:3], both[:3]) < 0.3 * distance(weight_only[:3], both[:3])


@triton_interpreter.interpreted
@pytest.mark.parametrize(("rows", "of_a_layer"), [(1, 6), (5, 5)])
def test_a_decode_step_uses_few_launches(rows, of_a_layer, on_a_gpu, monkeypatch):
    """With more rows, four of a layer's launches are the library's, which are not counted."""
    from triton.runtime import interpreter

    on_a_gpu()
    fused = optimized(qk_norm=True)
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
def test_argmax_tokens_match_the_logits(rows, fused, on_a_gpu):
    if fused:
        on_a_gpu()
    made = optimized() if fused else build()
    hidden = torch.randn(rows, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(1))
    hidden[-1, 0] = float("nan") if rows > 1 else 0.5
    logits, tokens = torch.empty(rows, SHAPE["vocab_size"]), torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows)

    with torch.no_grad():
        ids = made.executors.layers.bound.head.argmax(hidden, logits, tokens, logprobs)
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
def test_attention_without_a_kernel_falls_back_to_pytorch_between_triton_projections(on_a_gpu):
    expected = drive(build(head_dim=16), (1,))
    on_a_gpu()
    fused = optimized(head_dim=16)

    for ours, theirs in zip(drive(fused, (1,)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("arch", "dtype", "reason"),
    [
        (CPU, "float32", "needs a GPU"),
        (CATALOGUE["t4"], "float16", "this is sm_75"),
        (H100, "float64", "no float64"),
        (H100, "bfloat16", ""),
        (CATALOGUE["a100"], "float32", ""),
    ],
    ids=str,
)
def test_unsupported_fusion_is_reported_with_the_reason(arch, dtype, reason):
    found = triton_unsupported(VectorProblem(dtype), arch)

    assert bool(found) == bool(reason)
    assert reason in "; ".join(found)


def test_a_gpu_without_triton_kernels_falls_back_to_pytorch_with_a_warning(monkeypatch, caplog):
    plain = build()
    monkeypatch.setattr(model.network.parameters, "detect", lambda _device: CATALOGUE["t4"])

    plain.optimize()

    assert plain.executors.layers.bound.rotation is PYTORCH
    assert "slower: needs" in caplog.text
    assert plain.row_counts == ()
