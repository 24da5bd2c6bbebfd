"""Adapters written by PEFT for the tiny checkpoints of `hf_checkpoints`, with random matrices."""

from unittest import mock

import peft
import torch
import transformers

ATTENTION = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "phi3": ["qkv_proj", "o_proj"],
    "gpt2": ["attn.c_attn", "attn.c_proj"],
}
MLP = {
    "llama": ["gate_proj", "up_proj", "down_proj"],
    "phi3": ["gate_up_proj", "down_proj"],
    "gpt2": ["mlp.c_fc", "mlp.c_proj"],
}


HYBRIDS = {
    "qwen3.5": (ATTENTION["llama"], MLP["llama"]),
    "qwen3.5 more value heads tied biases": (["q_proj", "k_proj"], ["in_proj_b", "in_proj_qkv"]),
    "lfm2": (["self_attn.out_proj", "v_proj"], ["w1", "w2", "w3"]),
    "lfm2 untied biases": (["conv.in_proj"], ["conv.out_proj"]),
    "granite4": (ATTENTION["llama"], ["input_linear", "output_linear"]),
    "granite4 rope tied biases groups": (ATTENTION["llama"], ["mamba.in_proj"]),
    "bamba": (ATTENTION["llama"], MLP["llama"]),
    "bamba tied biases groups": (["in_proj"], ["out_proj"]),
    "falcon h1": (ATTENTION["llama"], MLP["llama"]),
    "falcon h1 norm tied biases": (["in_proj"], ["out_proj"]),
}
"""Checkpoints with recurrent layers, and some modules of each."""
ALL_LINEAR = "all-linear"
"""PEFT's word for all of them outside the head."""


def all_linear(kind="llama"):
    return ATTENTION[kind] + MLP[kind]


def adapted(model, folder, rank=8, targets=None, seed=0, std=0.1, **options):
    """Save a random adapter of a transformers model to a folder; returns the model of PEFT."""
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=options.pop("lora_alpha", 2 * rank),
        target_modules=targets or all_linear(),
        task_type="CAUSAL_LM",
        fan_in_fan_out=isinstance(model, transformers.GPT2LMHeadModel),
        **options,
    )
    if isinstance(model, transformers.FalconH1ForCausalLM):
        # PEFT refuses out_proj by this name, because kernels that are not installed here read its weight themselves.
        with mock.patch.object(model.config, "model_type", ""):
            with_adapter = peft.get_peft_model(model, config)
    else:
        with_adapter = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in with_adapter.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    with_adapter.save_pretrained(folder)
    return with_adapter.eval()
