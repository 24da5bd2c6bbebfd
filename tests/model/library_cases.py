"""Tiny random checkpoints of decoders of transformers that are no family of ours, and of some that are."""

from tests.model.checkpoint.hf_checkpoints import Case

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES = {
    "olmo": Case("Olmo", {"clip_qkv": 0.5}),
    "olmo tied": Case("Olmo", {"tie_word_embeddings": True}),
    "glm": Case("Glm", {"head_dim": 16}),
    "glm4": Case("Glm4", {"head_dim": 16}),
    "persimmon": Case("Persimmon"),
    "codegen": Case(
        "CodeGen", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8}
    ),
    "jais2": Case("Jais2"),
    "nanochat": Case("NanoChat"),
    "bitnet": Case("BitNet"),
    "vaultgemma windows": Case("VaultGemma", {"sliding_window": 8, "head_dim": 16}),
    "modernbert windows": Case(
        "ModernBertDecoder", {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 1}
    ),
    "mixtral windows": Case("Mixtral", {"num_local_experts": 4, "sliding_window": 12}),
    "qwen2 moe": Case("Qwen2Moe", {"num_experts": 4, **_EXPERTS}),
    "qwen3 moe": Case("Qwen3Moe", {"num_experts": 4, "head_dim": 16, **_EXPERTS}),
    "olmoe": Case("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4 moe": Case(
        "Glm4Moe",
        {"n_routed_experts": 4, "head_dim": 16, "n_group": 1, "topk_group": 1, **_EXPERTS},
    ),
    "granitemoe": Case("GraniteMoe", {"num_local_experts": 4, "attention_multiplier": 0.3}),
    "nemotron": Case("Nemotron"),
    "starcoder2 windows tied": Case(
        "Starcoder2", {"sliding_window": 12, "tie_word_embeddings": True}
    ),
    "granite": Case("Granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "gemma2 softcaps windows": Case("Gemma2", {"sliding_window": 8, "head_dim": 16}),
    "opt": Case("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
}
"""By name; the last ones are families of ours too."""
