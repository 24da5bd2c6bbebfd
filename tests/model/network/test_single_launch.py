"""Which models have decode steps in one launch, and what is said of the others."""

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.step.single_launch import StepShape, objection
from model.checkpoint.config import ModelConfig
from model.checkpoint.rope_config import RopeConfig
from model.network.decoder import DecoderLM
from model.network.single_launch import step_shape, why_not
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


def test_small_models_on_hopper_have_no_objection():
    llama = QWEN._replace(hidden_size=2048, inner_size=8192, num_heads=32, head_dim=64)

    assert objection(QWEN, torch.bfloat16, HOPPER) == ""
    assert objection(llama, torch.float16, HOPPER) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head dims (64, 128), not 96"),
        ({"hidden_size": 4096}, "hidden sizes up to 2048, not 4096"),
        ({"inner_size": 14336}, "intermediate sizes up to 8192, not 14336"),
        ({"hidden_size": 896}, "multiples of 1024, not a hidden size of 896"),
        ({"num_heads": 24}, "powers of two of heads, not 24"),
        ({"num_heads": 128, "num_kv_heads": 64}, "sizes of all heads up to 8192, not 16384"),
        ({"num_kv_heads": 2}, "up to 4 query heads for a key-value head, not 16 for 2"),
        ({"vocab_size": 32003}, "vocabularies that are multiples of 8, not 32003"),
    ],
)
def test_an_objection_names_the_value_and_the_limit(change, message):
    assert message in objection(QWEN._replace(**change), torch.bfloat16, HOPPER)


def test_a_slice_of_a_gpu_needs_a_program_for_each_head():
    slice_of_it = dataclasses.replace(HOPPER, num_sms=16)
    wide = QWEN._replace(num_kv_heads=32, num_heads=32, head_dim=64, hidden_size=2048)

    assert objection(wide, torch.bfloat16, HOPPER) == ""
    assert "32 SMs for as many key-value heads" in objection(wide, torch.bfloat16, slice_of_it)


def test_dtypes_and_gpus_without_the_kernel_are_named():
    assert "not float32" in objection(QWEN, torch.float32, HOPPER)
    assert "not a CPU" in objection(QWEN, torch.bfloat16, CATALOGUE["cpu"])
    assert "not sm_80" in objection(QWEN, torch.bfloat16, ARCHES[80])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"mlp_bias": True}, "biases of the MLP"),
        ({"attention_output_bias": True}, "a bias of the output projection"),
        ({"sliding_window": 64, "layer_types": ()}, "sliding windows"),
    ],
)
def test_what_the_launch_does_not_know_is_named(monkeypatch, change, message):
    monkeypatch.setattr("model.network.single_launch.objection", lambda *_: "")
    model = DecoderLM(dataclasses.replace(CONFIG, **change), torch.bfloat16, "meta")

    reason = why_not(model, HOPPER)

    assert reason == (f"one launch for a step does not know {message}" if message else "")


def test_the_shape_of_a_step_is_that_of_the_model():
    shape = step_shape(DecoderLM(CONFIG, torch.bfloat16, "meta"))

    assert shape.hidden_size == CONFIG.hidden_size
    assert shape.inner_size == CONFIG.intermediate_size
    assert shape.softmax_scale == CONFIG.head_dim**-0.5
