"""GGUF files of Granite and of hybrids with Mamba-2, as llama.cpp's conversion writes them, and the same models in
transformers.

The names of tensors are those that the `gguf` package maps.
"""

import gguf
import numpy as np
import torch
import transformers

from tests.model.gguf.written import random_rows

HYBRIDS = ("granite", "granitehybrid", "falcon-h1")
_SHAPE = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 64, "mamba_n_groups": 1}
_GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 0.25,
}  # fmt: skip
_DEFAULTS = {
    "granite": _GRANITE,
    "granitehybrid": {
        **_MAMBA, **_GRANITE, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 512,
    },
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "rope_theta": 5_000.0},
    "falcon-h1": {
        **_MAMBA, "mamba_d_ssm": 512, "mamba_n_groups": 2, "head_dim": 64,
        "embedding_multiplier": 5.0, "lm_head_multiplier": 0.5, "attention_in_multiplier": 0.7,
        "attention_out_multiplier": 0.8, "key_multiplier": 1.4, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.3,
        "ssm_multipliers": [0.35, 0.25, 0.7, 0.5, 0.4], "mlp_multipliers": [0.9, 0.4],
        "mamba_norm_before_gate": False,
    },
}  # fmt: skip
_CLASSES = {
    "granite": "Granite",
    "granitehybrid": "GraniteMoeHybrid",
    "bamba": "Bamba",
    "falcon-h1": "FalconH1",
}
_ENUMS = {"granite": "GRANITE", "falcon-h1": "FALCON_H1"}


def build(arch, **changes):
    """Return a model in transformers whose parameters `write` replaces.

    Args:
        arch: one of `HYBRIDS`, or "bamba", which is "granitehybrid" in GGUF.
        changes: of the configuration.
    """
    name = _CLASSES[arch]
    config = getattr(transformers, f"{name}Config")(**(_SHAPE | _DEFAULTS[arch] | changes))
    config._attn_implementation = "eager"
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def write(path, arch, kinds="F32", metadata=None, tokenizer=None, seed=0, **changes):
    """Write a GGUF file with random weights, as `written.write` does, and return the same model in transformers."""
    model = build(arch, **changes)
    config = model.config
    in_gguf = "granitehybrid" if arch == "bamba" else arch
    writer = gguf.GGUFWriter(path, in_gguf)
    _add_config(writer, arch, config)
    for key, (value, kind) in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            writer.add_key_value(key, value, kind)
    if tokenizer is not None:
        tokenizer(writer)
    enum = getattr(gguf.MODEL_ARCH, _ENUMS.get(arch, "GRANITE_HYBRID"))
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            stored = _names(names, name)
            rows = len(parameter) // len(stored)
            parts = [
                _add(writer, it, name, (rows, *parameter.shape[1:]), kinds, seed + 100 * number + i, arch, config)
                for i, it in enumerate(stored)
            ]  # fmt: skip
            parameter.copy_(torch.cat(parts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _names(names, name):
    """Return the names of the tensors in GGUF that have the rows of a parameter, in order."""
    if "shared_mlp.input_linear" in name:
        block = name.split(".")[2]
        return [f"blk.{block}.ffn_{it}.weight" for it in ("gate", "up")]
    if "shared_mlp.output_linear" in name:
        return [f"blk.{name.split('.')[2]}.ffn_down.weight"]
    mapped = name.replace(".dt_bias", ".dt_proj.bias")
    return [names.get_name(mapped, try_suffixes=(".weight", ".bias"))]


def _add(writer, stored, name, shape, kinds, seed, arch, config):
    """Add a tensor to the file and return its values in transformers."""
    end = name.split(".", 3)[-1]
    if len(shape) == 2:
        kind = kinds if isinstance(kinds, str) else kinds(stored)
        raw, values = random_rows(kind, shape, seed)
        if kind in ("F32", "F16"):
            raw = values.numpy().astype(np.float32 if kind == "F32" else np.float16)
            writer.add_tensor(stored, raw)
        else:
            writer.add_tensor(stored, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    else:
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
        values = (drawn - 1) * 0.2 if name.endswith("bias") or len(shape) == 3 else drawn
        if end == "mamba.A_log":
            writer.add_tensor(stored, -values.exp().numpy()[:, None])
            return values
        held = values
        if end == "mamba.D":
            held = values[:, None]
        if end == "mamba.norm.weight":
            held = values.view(config.mamba_n_groups, -1)
        if len(shape) == 3:
            held = values[:, 0]
        writer.add_tensor(stored, held.contiguous().numpy())
    if arch == "falcon-h1":
        return values / _multiplied(name, values, config)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((it for key, it in heads.items() if key in name), None)
    if count is None:
        return values
    pairs = values.reshape(count, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _multiplied(name, values, config):
    """Return by what llama.cpp's conversion multiplies a tensor of Falcon-H1."""
    before = config.attention_in_multiplier
    found = {
        "embed_tokens": config.embedding_multiplier, "lm_head": config.lm_head_multiplier,
        "q_proj": before, "v_proj": before, "k_proj": before * config.key_multiplier,
        "o_proj": config.attention_out_multiplier, "gate_proj": config.mlp_multipliers[0],
        "down_proj": config.mlp_multipliers[1], "out_proj": config.ssm_out_multiplier,
    }  # fmt: skip
    module = name.split(".")[-2]
    if module == "in_proj":
        inner, between = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = torch.tensor([inner, inner, between, between, config.mamba_n_heads])
        rows = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes)
        return config.ssm_in_multiplier * rows[:, None]
    return found.get(module, 1.0)


def _add_config(writer, arch, config):
    """Add the keys that llama.cpp's conversion writes."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base((config.rope_parameters or {}).get("rope_theta", 10_000.0))
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    dims = config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads
    if arch == "falcon-h1":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        writer.add_rope_dimension_count(dims // 2 if arch == "bamba" else dims)
    if arch in ("granite", "granitehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "granitehybrid":
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        kv_heads = [kv_heads * (it == "full_attention") for it in config.layer_types]
    if arch == "bamba":
        writer.add_rope_scaling_finetuned(True)
        count = config.num_hidden_layers
        kv_heads = [kv_heads * (it in config.attn_layer_indices) for it in range(count)]
    writer.add_head_count_kv(kv_heads)
    if arch != "granite":
        inner = config.mamba_n_heads * config.mamba_d_head
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(inner)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
