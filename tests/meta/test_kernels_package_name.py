"""Our package `kernels` has the same name as a package that transformers looks for."""

from pathlib import Path

import torch
import transformers

import kernels

ROOT = Path(__file__).parents[2]


def test_importing_kernels_finds_our_package():
    assert Path(kernels.__file__) == ROOT / "kernels" / "__init__.py"


def test_transformers_runs_a_model_with_our_package_kernels_imported():
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )

    logits = transformers.LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits

    assert logits.shape == (1, 3, 16)
    assert torch.isfinite(logits).all()
