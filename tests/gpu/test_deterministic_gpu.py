"""Deterministic requests on a GPU: the same bits in any company, for random models and the bundled one."""

from __future__ import annotations

import gc

import pytest
import torch

import kernels
from benchmarks.local_engine import LocalEngine
from kernels.fp8 import quantize_rows
from kernels.linear.projection import SWIGLU, Norm, Operations, Purpose, Residual, bind_projection
from kernels.norms.gpu.norm_and_gate import add_rms_norm
from model.hub.resolve import BUNDLED, resolve
from server.engine.core.messages import EngineConfig
from tests.engine.runner.companies import check_companies
from tests.kernels.linear.weights import linear_weights
from tests.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

BLOCK_SIZE = 16
ROWS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 65, 128, 200, 256, 257, 300, 512, 1000)
SHAPES = {"vocab_size": 3000, "bos_token_id": 2998, "eos_token_id": 2999}
MODELS = {
    "norms per head": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512,
        "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
    },
    "bias": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 448,
        "intermediate_size": 1216, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64,
    },
    "window": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 512,
        "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "sliding_window": 1100,
    },
    "odd sizes": {
        "hidden_size": 360, "intermediate_size": 1000, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 80,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_tensor_cores():
    if not kernels.detect("cuda").has_triton_tensor_cores:
        pytest.skip("no batch-invariant kernel before sm_80")


@pytest.fixture
def make_engine(request, tmp_path):
    name, changes = request.param
    folder = resolve(BUNDLED)
    if name != "bundled":
        folder = write_tiny_checkpoint(
            tmp_path, **SHAPES, **MODELS[name], max_position_embeddings=4096, num_hidden_layers=3
        )

    def make(**company):
        gc.collect()
        torch.cuda.empty_cache()
        config = {
            "model_path": str(folder),
            "model_id": name,
            "device": "cuda",
            "dtype": "bfloat16",
            "max_model_len": 1200,
            "kv_cache_tokens": 1 << 16,
            "block_size": BLOCK_SIZE,
        }
        return LocalEngine(EngineConfig(**(config | changes | company)))

    yield make
    gc.collect()
    torch.cuda.empty_cache()


def cases(*chosen):
    return [pytest.param(it, id=" ".join((it[0], *map(str, it[1].values())))) for it in chosen]


@pytest.mark.parametrize(
    "make_engine",
    cases(
        ("bundled", {}),
        ("norms per head", {}),
        ("norms per head", {"deterministic": True}),
        ("bias", {}),
        ("odd sizes", {}),
        ("norms per head", {"dtype": "float16"}),
        ("norms per head", {"quantization": "fp8"}),
        ("norms per head", {"kv_cache_dtype": "fp8"}),
    ),
    indirect=True,
)
def test_64_requests_have_the_same_bits_in_20_random_companies(make_engine):
    assert check_companies(make_engine, SHAPES["vocab_size"], 20, BLOCK_SIZE, longest=600) > 0


@pytest.mark.parametrize(
    "make_engine",
    cases(
        ("norms per head", {"max_model_len": 3200}),
        ("bias", {"max_model_len": 3200}),
        ("window", {"max_model_len": 3200}),
    ),
    indirect=True,
)
def test_64_requests_of_several_parts_have_the_same_bits_in_4_random_companies(make_engine):
    assert check_companies(make_engine, SHAPES["vocab_size"], 4, BLOCK_SIZE, longest=2500) > 0


@pytest.mark.parametrize("make_engine", cases(("norms per head", {})), indirect=True)
def test_the_plan_names_the_kernels(make_engine):
    plan = make_engine().engine.info.plan.deterministic

    assert plan.requests == "on request"
    ours = "hopper_" if kernels.detect("cuda").sm == 90 else ""
    assert f"by {ours}invariant_prefill, {ours}invariant_decode" in plan.why
    assert make_engine(deterministic=True).engine.info.plan.deterministic.requests == "all"


def random(*shape, scale=1.0, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * scale).to(dtype)


def bound(outputs, inputs, kind, weight_dtype):
    weight, scale = random(outputs, inputs, scale=inputs**-0.5), None
    if weight_dtype == "fp8":
        weight, scale = quantize_rows(weight.float())
    bias = random(outputs, seed=1) if kind == "bias" else None
    return bind_projection(
        linear_weights(weight, bias, scale),
        torch.bfloat16,
        kernels.detect("cuda"),
        Operations(
            Norm(random(inputs, seed=2), 1e-6),
            SWIGLU if kind == "gated" else None,
            residual=kind == "residual",
        ),
        layer_weights=0 if kind == "head" else 1 << 20,
        purpose=Purpose.DETERMINISTIC_SERVING,
    )


@pytest.mark.parametrize("weight_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("outputs", "inputs", "kind"),
    [
        (4096, 1024, "plain"),
        (3072, 2048, "bias"),
        (6144, 1024, "gated"),
        (1024, 3072, "residual"),
        (2048, 8192, "residual"),
        (576, 1536, "residual"),
        (1000, 360, "gated"),
        (32000, 1024, "head"),
        (3001, 512, "head"),
    ],
)
def test_a_row_of_a_product_has_the_same_bits_among_any_number_of_others(
    outputs, inputs, kind, weight_dtype
):
    layer = bound(outputs, inputs, kind, weight_dtype)
    x = random(ROWS[-1], inputs, seed=3)
    start, weight = random(ROWS[-1], outputs, seed=4), random(outputs, seed=5)

    def compute(rows):
        if kind == "residual":
            stream = layer.to_residual(x[rows], Residual(start[rows]))
            if stream.partials is not None:
                # Some kernels leave this to the norm of the next product.
                add_rms_norm(stream.hidden, weight, 1e-6, parts=stream.partials)
            return stream.hidden
        if kind == "head":
            return layer(x[rows])
        return layer.from_residual(Residual(x[rows].clone()))[0]

    every = torch.arange(ROWS[-1], device="cuda")
    whole = compute(every)
    for count in ROWS:
        picked = every[torch.randperm(ROWS[-1], device="cuda")[:count]]
        assert torch.equal(compute(picked), whole[picked]), count
