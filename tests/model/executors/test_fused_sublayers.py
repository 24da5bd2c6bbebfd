"""Layers of Gemma 4 and 3n on the kernels of a GPU, in Triton's interpreter, compared with separate operations."""

import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM
from tests.kernels import triton_interpreter
from tests.model.executors.test_fused_layers import drive, on_a_gpu

__all__ = ["on_a_gpu"]

SHAPE = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 20,
}
CASES = {
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "global_head_dim": 64,
        "vocab_size_per_layer_input": 24,
        "final_logit_softcapping": 3.0,
    },
    "gemma4 large": {
        "architectures": ["Gemma4ForCausalLM"],
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "gemma3n": {
        "architectures": ["Gemma3nForCausalLM"],
        "activation_sparsity_pattern": [0.5, 0.0, 0.8, 0.0],
        "laurel_rank": 16,
    },
}
TYPES = {"Gemma4ForCausalLM": "gemma4_text", "Gemma3nForCausalLM": "gemma3n_text"}


def build(case):
    changes = CASES[case]
    config = ModelConfig.from_dict(
        SHAPE | changes | {"model_type": TYPES[changes["architectures"][0]]}
    )
    made = DecoderLM(config)
    made.init_weights(std=0.15, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or name.endswith("scale"):
                # Scores are not divided, and a small error must not choose another key.
                least = 0.2 if name.endswith(("q_norm", "k_norm")) else 0.5
                parameter.uniform_(least, 3 * least, generator=generator)
    return made


@triton_interpreter.interpreted
@pytest.mark.parametrize("case", CASES)
def test_fused_layers_match_the_logits_and_tokens_of_separate_operations(case, on_a_gpu):
    expected = drive(build(case), (1, 3))
    on_a_gpu()
    fused = build(case).requires_grad_(requires_grad=False)
    fused.optimize()

    with triton_interpreter.poisoned_memory():
        found = drive(fused, (1, 3))

    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("case", CASES)
def test_over_an_fp8_cache_layers_read_the_keys_and_scales_of_others(case):
    made = build(case)
    expected = drive(made, (1, 3))

    found = drive(made, (1, 3), torch.float8_e4m3fn)

    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 0.2 * theirs.abs().max()
    assert not all(map(torch.equal, found, expected))
