"""Which models support decode steps in a single launch, and the reasons for the others."""

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.step.single_launch import StepShape, unsupported
from model.checkpoint.config import ModelConfig
from model.checkpoint.rope_config import RopeConfig
from model.network.decoder import DecoderLM
from model.network.single_launch import step_shape
from tests.kernels.compile.cross_compile_jobs import ARCHES

HOPPER = ARCHES[90]
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope=RopeConfig(),
)
QWEN = StepShape(1024, 3072, 16, 8, 128, 151936, 1e-6, 128**-0.5)


def test_small_models_on_hopper_are_supported():
    llama = QWEN._replace(hidden_size=2048, inner_size=8192, num_heads=32, head_dim=64)

    assert unsupported(QWEN, torch.bfloat16, HOPPER) == ()
    assert unsupported(llama, torch.float16, HOPPER) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head_dim 96 is not one of (64, 128)"),
        ({"hidden_size": 4096}, "a hidden size of 4096, at most 2048"),
        ({"inner_size": 14336}, "an intermediate size of 14336, at most 8192"),
        ({"hidden_size": 896}, "a hidden size of 896, not a multiple of 1024"),
        ({"num_heads": 24}, "24 heads are not a power of two"),
        ({"num_heads": 128, "num_kv_heads": 64}, "a size of all heads of 16384, at most 8192"),
        ({"num_kv_heads": 2}, "16 query heads for 2, at most 4 for each"),
        ({"vocab_size": 32003}, "a vocabulary of 32003, not a multiple of 8"),
    ],
)
def test_a_reason_names_the_value_and_the_limit(change, message):
    assert message in unsupported(QWEN._replace(**change), torch.bfloat16, HOPPER)


def test_all_reasons_are_listed():
    shape = QWEN._replace(hidden_size=896, num_heads=24)

    assert len(unsupported(shape, torch.float32, CATALOGUE["a100"])) == 4


def test_a_gpu_slice_needs_an_sm_for_each_kv_head():
    slice_of_it = dataclasses.replace(HOPPER, num_sms=16)
    wide = QWEN._replace(num_kv_heads=32, num_heads=32, head_dim=64, hidden_size=2048)

    assert unsupported(wide, torch.bfloat16, HOPPER) == ()
    assert unsupported(wide, torch.bfloat16, slice_of_it) == (
        "16 SMs for 32 key-value heads; from 32 to 256",
    )


def test_unsupported_dtypes_and_gpus_are_named():
    assert unsupported(QWEN, torch.float32, HOPPER) == ("no float32",)
    assert "needs a GPU" in unsupported(QWEN, torch.bfloat16, CATALOGUE["cpu"])
    assert "needs sm_90, this is sm_80" in unsupported(QWEN, torch.bfloat16, ARCHES[80])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"mlp_bias": True}, "biases of the MLP"),
        ({"attention_output_bias": True}, "a bias of the output projection"),
        ({"sliding_window": 64, "layer_types": ()}, "sliding windows"),
    ],
)
def test_unsupported_features_are_named(monkeypatch, change, message):
    monkeypatch.setattr("model.network.single_launch.shape_unsupported", lambda *_: ())
    model = DecoderLM(dataclasses.replace(CONFIG, **change), torch.bfloat16, "meta")

    assert model.single_launch_unsupported(HOPPER) == ((f"no {message}",) if message else ())


def test_the_step_shape_equals_the_models():
    shape = step_shape(CONFIG)

    assert shape.hidden_size == CONFIG.hidden_size
    assert shape.inner_size == CONFIG.intermediate_size
    assert shape.softmax_scale == CONFIG.head_dim**-0.5
