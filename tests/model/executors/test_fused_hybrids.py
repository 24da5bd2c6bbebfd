"""Layers of hybrids: one product of all that reads the stream, and the kernels of a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.collective.communicator import AbsentRanks
from kernels.linear.around import multiply_by_sigmoid_on_gpu
from kernels.stacked import ROW_MULTIPLE
from kernels.weight_format import FP8_ROWS, INT8_GROUPS, WeightFormat
from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM
from tests.kernels import triton_interpreter
from tests.model.executors.test_fused_layers import drive, on_a_gpu

__all__ = ["on_a_gpu"]

HIDDEN = 64
CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 24,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 128,
}
_MAMBA = {
    "vocab_size": 24,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_expand": 1,
    "mamba_proj_bias": False,
    "max_position_embeddings": 128,
}
SHARED = {
    "qwen3.5": CONFIG | {"num_key_value_heads": 2},
    "granite4": _MAMBA | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "num_local_experts": 0,
        "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"],
    },
    "falcon h1": _MAMBA | {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "mamba_d_ssm": 64, "head_dim": 16,
        "intermediate_size": 32, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
    },
}  # fmt: skip
ROWS = 2 * 2 * 16 + 2 * 4 * 16, 2 * 4
"""Of the matrix of queries, keys, values and z, and of that of the gates."""


def build(weight_format=None, dtype=torch.float32, config=CONFIG, communicator=None):
    made = DecoderLM(
        ModelConfig.from_dict(config), dtype, weight_format=weight_format, communicator=communicator
    )
    made.init_weights(std=0.15, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return made.requires_grad_(requires_grad=False)


def optimized(made):
    made.optimize()
    return made


def products(made):
    return set(made.executors.layers.bound.layers[0].projections)


def assert_close(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@triton_interpreter.interpreted
def test_layers_on_a_gpu_match_separate_operations(on_a_gpu):
    expected = drive(build(), (1, 3))
    on_a_gpu()
    fused = optimized(build())
    assert products(fused) == {"input", "mixed", "gate_up", "down"}
    output_gate = fused.executors.layers.bound.layers[1].mixer.output_gate
    assert output_gate.func is multiply_by_sigmoid_on_gpu

    with triton_interpreter.poisoned_memory():
        found = drive(fused, (1, 3))

    assert_close(found, expected, 1e-4)


@triton_interpreter.interpreted
def test_layers_on_a_gpu_in_fp8_match_separate_operations(on_a_gpu):
    expected = drive(build(FP8_ROWS), (1, 3))
    on_a_gpu()

    found = drive(optimized(build(FP8_ROWS)), (1, 3))

    assert_close(found, expected, 1e-3)


@triton_interpreter.interpreted
@pytest.mark.parametrize("name", SHARED)
def test_a_rank_on_a_gpu_matches_separate_operations(name, on_a_gpu):
    """Of two ranks that have the same part."""
    expected = drive(build(config=SHARED[name], communicator=AbsentRanks(2)), (1, 3))
    on_a_gpu()
    fused = optimized(build(config=SHARED[name], communicator=AbsentRanks(2)))

    with triton_interpreter.poisoned_memory():
        found = drive(fused, (1, 3))

    assert_close(found, expected, 1e-4)


@pytest.mark.parametrize("form", [None, FP8_ROWS, INT8_GROUPS], ids=["full", "fp8", "int8"])
def test_matrices_of_one_format_have_one_product(form):
    made = build(form)
    expected = drive(made, (1, 3))
    layer = made.decoder_layers[0]

    assert layer.in_one("input", "gates").shape == (2 * ROW_MULTIPLE, HIDDEN)
    assert [layer.matrices[name].shape[0] for name in ("input", "gates")] == list(ROWS)
    assert products(made) == {"input", "gates", "mixed", "gate_up", "down"}
    optimized(made)
    assert products(made) == {"input", "mixed", "gate_up", "down"}
    copied = made.executors.layers.bound.layers[0].mixer.input.copies_weights
    assert copied == (form is None)
    assert [name in layer.matrices for name in ("input", "gates")] == [not copied] * 2
    assert_close(drive(made, (1, 3)), expected, 1e-4)


def test_matrices_of_two_formats_have_two_products():
    blocks = WeightFormat("fp8-blocks", 8, 32, "block")
    for form in ({"layers.0.input": FP8_ROWS}, blocks):
        made = build(form)
        expected = drive(made, (1, 3))

        optimized(made)

        assert products(made) == {"input", "gates", "mixed", "gate_up", "down"}
        assert_close(drive(made, (1, 3)), expected, 1e-4)


def test_parameters_that_were_moved_have_two_products():
    made = build().to(torch.float64).to(torch.float32)

    optimized(made)

    assert "gates" in products(made)


def test_each_matrix_has_a_gradient():
    made = DecoderLM(ModelConfig.from_dict(CONFIG))
    made.init_weights(std=0.15, seed=0)

    made(torch.tensor([[1, 2, 3, 4]]), torch.arange(4)).square().sum().backward()

    layer = made.decoder_layers[0]
    for matrix in (layer.input, layer.gates):
        assert matrix.numbers.grad.shape == matrix.numbers.shape
        assert bool(matrix.numbers.grad.any())
