"""What config.json of real checkpoints states, without keys that no family reads, and their parameters.

transformers counted the parameters on the device "meta".
"""

_BFLOAT16 = {"torch_dtype": "bfloat16"}
_YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}


def _llama3(factor, original):
    return {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": original,
        "rope_type": "llama3",
    }


def _sizes(hidden, inner, layers, heads, kv_heads, vocab, context):
    return _BFLOAT16 | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
    }


def _kinds(count, pattern):
    """Return the types of layers of which each `pattern`-th one attends to all tokens."""
    return (["sliding_attention"] * (pattern - 1) + ["full_attention"]) * (count // pattern)


_GEMMA4 = {
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10_000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262_144,
}
_GEMMA3N = {
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "laurel_rank": 64,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
}
FILES = {
    "OLMo-3-7B": (
        "Olmo3ForCausalLM",
        7_298_011_136,
        _sizes(4096, 11008, 32, 32, 32, 100_278, 65_536)
        | {"rope_theta": 500_000, "rope_scaling": _YARN, "sliding_window": 4096},
    ),
    "EXAONE-4.0-1.2B": (
        "Exaone4ForCausalLM",
        1_279_391_488,
        _sizes(2048, 4096, 30, 32, 8, 102_400, 65_536)
        | {
            "head_dim": 64,
            "rope_scaling": _llama3(16.0, 8192),
            "rope_theta": 1_000_000,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
    ),
    "EXAONE-4.0-32B": (
        "Exaone4ForCausalLM",
        32_003_216_384,
        _sizes(5120, 27_392, 64, 40, 8, 102_400, 131_072)
        | {
            "head_dim": 128,
            "rope_scaling": _llama3(16.0, 8192),
            "rope_theta": 1_000_000,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False,
        },
    ),
    "ERNIE-4.5-0.3B": (
        "Ernie4_5ForCausalLM",
        360_748_032,
        _sizes(1024, 3072, 18, 16, 2, 103_424, 131_072)
        | {
            "compression_ratio": 1.0,
            "head_dim": 128,
            "rope_theta": 500_000,
            "tie_word_embeddings": True,
            "use_bias": False,
        },
    ),
    "Seed-OSS-36B": (
        "SeedOssForCausalLM",
        36_151_104_512,
        _sizes(5120, 27_648, 64, 80, 8, 155_136, 524_288)
        | {
            "attention_bias": True,
            "attention_out_bias": False,
            "head_dim": 128,
            "mlp_bias": False,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10_000_000.0,
        },
    ),
    "AFM-4.5B": (
        "ArceeForCausalLM",
        4_619_184_640,
        _sizes(2560, 18_432, 36, 20, 4, 128_004, 65_536)
        | {
            "head_dim": 128,
            "hidden_act": "relu2",
            "rope_scaling": {
                "factor": 20.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
            },
            "rope_theta": 10_000.0,
        },
    ),
    "Hunyuan-0.5B": (
        "HunYuanDenseV1ForCausalLM",
        463_512_576,
        _sizes(1024, 3584, 24, 8, 4, 120_818, 262_144)
        | {
            "attention_head_dim": 128,
            "head_dim": 128,
            "rope_scaling": {
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
            "use_cla": False,
            "use_qk_norm": True,
        },
    ),
    "Apertus-8B": (
        "ApertusForCausalLM",
        8_053_338_176,
        _sizes(4096, 21_504, 32, 32, 8, 131_072, 65_536)
        | {
            "hidden_act": "xielu",
            "mlp_bias": False,
            "post_norm": False,
            "qk_norm": True,
            "rope_scaling": _llama3(8.0, 8192),
            "rope_theta": 12_000_000,
        },
    ),
    "helium-1-2b": (
        "HeliumForCausalLM",
        2_023_868_416,
        _sizes(2048, 8192, 28, 16, 8, 64_000, 4096)
        | {"head_dim": 128, "rms_norm_eps": 1e-08, "rope_theta": 20_000.0},
    ),
    "Minitron-4B": (
        "NemotronForCausalLM",
        4_190_509_056,
        _sizes(3072, 9216, 32, 24, 8, 256_000, 4096)
        | {
            "head_dim": 128,
            "hidden_act": "relu2",
            "norm_eps": 1e-05,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10_000.0,
        },
    ),
    "internlm3-8b": (
        "InternLM3ForCausalLM",
        8_804_241_408,
        _sizes(4096, 10_240, 48, 32, 2, 128_512, 32_768)
        | {
            "auto_map": {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"},
            "bias": False,
            "head_dim": 128,
            "qkv_bias": False,
            "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
            "rope_theta": 50_000_000,
        },
    ),
    "cwm": (
        "CwmForCausalLM",
        32_581_097_472,
        _sizes(6144, 21_504, 64, 48, 8, 128_256, 131_072)
        | {"head_dim": 128, "rope_scaling": _llama3(16.0, 8192), "rope_theta": 1_000_000.0},
    ),
    "gemma-4-E2B": (
        "Gemma4ForCausalLM",
        4_628_569_379,
        _sizes(1536, 6144, 35, 8, 1, 262_144, 131_072)
        | _GEMMA4
        | {
            "layer_types": _kinds(35, 5),
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "num_global_key_value_heads": None,
        },
    ),
    "gemma-4-E4B": (
        "Gemma4ForCausalLM",
        7_463_013_418,
        _sizes(2560, 10_240, 42, 8, 2, 262_144, 131_072)
        | _GEMMA4
        | {"layer_types": _kinds(42, 6), "num_kv_shared_layers": 18, "use_double_wide_mlp": False},
    ),
    "gemma-4-31B": (
        "Gemma4ForCausalLM",
        30_697_345_340,
        _sizes(5376, 21_504, 60, 32, 16, 262_144, 262_144)
        | _GEMMA4
        | {
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "layer_types": _kinds(60, 6),
            "num_global_key_value_heads": 4,
            "num_kv_shared_layers": 0,
            "sliding_window": 1024,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma-3n-E2B": (
        "Gemma3nForCausalLM",
        4_435_182_688,
        _sizes(2048, [8192] * 30, 30, 8, 2, 262_400, 32_768)
        | _GEMMA3N
        | {
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
            "layer_types": _kinds(30, 5),
            "num_kv_shared_layers": 10,
        },
    ),
    "gemma-3n-E4B": (
        "Gemma3nForCausalLM",
        6_835_235_568,
        _sizes(2048, 16_384, 35, 8, 2, 262_400, 32_768) | _GEMMA3N | {"num_kv_shared_layers": 15},
    ),
}
