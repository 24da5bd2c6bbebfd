"""Tiny random checkpoints of every supported family and variant, written by transformers."""

import dataclasses
import json

import torch
import transformers

from model.families.table import find_architecture

VOCAB_SIZE = 128
_LESS_1 = ("Gemma", "Gemma2", "Gemma3", "Gemma3Text", "Nemotron")
"""Families whose weights of norms are stored less 1."""
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint: its family, changes to the common shape, and how it is stored."""

    family: str
    changes: dict = dataclasses.field(default_factory=dict)
    shard_size: str = "5GB"
    rounded: bool = (
        False  # whether weights are rounded to bfloat16, although the files hold float32
    )
    model: str = "ForCausalLM"  # the class of the model, after the family
    in_half: bool = False  # whether logits in bfloat16 are compared too
    others: dict = dataclasses.field(
        default_factory=dict
    )  # configurations of other models beside the language model
    named: str = ""  # the class of the model, where it is not named after the family
    restated: dict = dataclasses.field(
        default_factory=dict
    )  # changes of config.json, of a family that transformers computes under another name

    @property
    def architecture(self):
        return self.named or self.family.removesuffix("Text") + self.model

    @property
    def content(self):
        """What config.json states."""
        return self.config().to_dict() | {"architectures": [self.architecture]} | self.restated

    @property
    def served(self):
        """The family's name."""
        return find_architecture(self.content)

    @property
    def exact(self):
        """The checkpoint as transformers computes it."""
        return dataclasses.replace(self, restated={})

    def config(self):
        stated = _SHAPE | self.changes
        kind = getattr(transformers, f"{self.family}Config")
        return kind(text_config=stated, **self.others) if self.others else kind(**stated)

    def build(self):
        """Return the model in transformers; all parameters are random, including norms and biases."""
        torch.manual_seed(0)
        config = self.config()
        # Eager: another implementation would not cap scores.
        config._attn_implementation = "eager"
        model = getattr(transformers, self.architecture)(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                    low = -0.5 if self.family in _LESS_1 else 0.5
                    parameter.uniform_(low, low + 1)
                else:
                    parameter.normal_(0, 0.2)
                if self.rounded:
                    parameter.copy_(parameter.bfloat16())
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
        return model.eval()

    def save(self, folder):
        model = self.build()
        model.save_pretrained(folder, max_shard_size=self.shard_size)
        if self.restated:
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | self.restated))
        return model


def _rope(rope_type, **fields):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **fields}}


def _gemma(**changes):
    """Windows of 16 tokens in some of the layers, and a scale of the scores that is not the head dim's."""
    return _layers(
        3,
        head_dim=24,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=16,
        query_pre_attn_scalar=40,
        tie_word_embeddings=True,
        **changes,
    )


_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_LOCAL_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}


def _gemma_nano(per_layer, **changes):
    """Layers of two types, of which the last ones read the keys and values of others."""
    return _layers(
        6,
        layer_types=_KINDS[:2] * 3,
        head_dim=16,
        sliding_window=16,
        hidden_size_per_layer_input=per_layer,
        **changes,
    )


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "out_hidden_size": 64,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0}


def longrope(pairs, original):
    """LongRoPE of heads of which `pairs` pairs of dimensions rotate, in the form of Phi."""
    factors = {
        "short_factor": [1.0 + 0.02 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.5 * i for i in range(pairs)],
    }
    return {"original_max_position_embeddings": original, "rope_parameters": _LONGROPE | factors}


def _layers(count, **changes):
    return {"num_hidden_layers": count, **changes}


_GEMMA4 = _gemma_nano(
    8,
    global_head_dim=32,
    num_kv_shared_layers=3,
    use_double_wide_mlp=True,
    vocab_size_per_layer_input=VOCAB_SIZE,
    final_logit_softcapping=5.0,
)
_GEMMA4_LARGE = _gemma_nano(
    0, global_head_dim=24, attention_k_eq_v=True, num_global_key_value_heads=1
)
_GEMMA3N = _gemma_nano(
    8,
    num_kv_shared_layers=2,
    vocab_size_per_layer_input=100,
    laurel_rank=8,
    intermediate_size=[96, 96, 64, 96, 32, 96],
    activation_sparsity_pattern=[0.9, 0.5, 0.0, 0.0, 0.8, 0.0],
)
_GEMMA_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}


def _mrope(section, **changes):
    return _rope("default", mrope_section=section, **changes)


def _ministral(original):
    """YaRN and a scale of queries, which grows several times within the prompts of the tests."""
    return _rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=original,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.5,
    )


def _named(architecture, model_type, **keys):
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "auto_map": {"AutoModelForCausalLM": f"modeling.{architecture}"},
        **keys,
    }


def _minicpm(layers):
    """The multipliers of `_MINICPM` under the names of Granite."""
    return _layers(
        layers,
        embedding_multiplier=12.0,
        residual_multiplier=1.4 / layers**0.5,
        attention_multiplier=16**-0.5,
        logits_scaling=64 / 16,
    )


_MINICPM = _named(
    "MiniCPMForCausalLM", "minicpm", scale_emb=12, scale_depth=1.4, dim_model_base=16
) | dict.fromkeys(_minicpm(4).keys() - {"num_hidden_layers"})
# The class has a list of end tokens for null.
_CWM = _layers(5, head_dim=16, sliding_window=16, max_position_embeddings=16384, eos_token_id=2)
_QWEN3_5 = _layers(
    4,
    head_dim=16,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
)
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16}
_GRANITE4 = {"num_local_experts": 0, "shared_intermediate_size": 96, **_MAMBA, **_GRANITE}
_FALCON_H1 = {
    **_MAMBA,
    "mamba_d_ssm": 96,
    "head_dim": 16,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.1,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 1.4,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.3,
    "ssm_multipliers": [0.35, 0.25, 0.7, 0.5, 0.4],
    "mlp_multipliers": [0.9, 0.4],
}
_LFM2 = _layers(4, full_attn_idxs=[1], block_multiple_of=16, block_ffn_dim_multiplier=1.1)
# The class of the multimodal model needs the library timm for its encoder of images.
_GEMMA3N_MULTIMODAL = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "model_type": "gemma3n",
    "text_config": Case("Gemma3nText", _GEMMA3N).config().to_dict(),
    "final_logit_softcapping": None,
}
CASES = {
    "llama": Case("Llama"),
    "llama sharded": Case("Llama", shard_size="40KB"),
    "llama tied": Case("Llama", {"tie_word_embeddings": True}),
    "llama tied sharded": Case("Llama", {"tie_word_embeddings": True}, shard_size="40KB"),
    "llama biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama rounded": Case("Llama", {"attention_bias": True}, rounded=True),
    "llama mqa": Case("Llama", {"num_key_value_heads": 1}),
    "llama mha": Case("Llama", {"num_key_value_heads": 4}),
    "llama head_dim": Case("Llama", {"head_dim": 24}),
    "llama rope llama3": Case(
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama rope linear": Case("Llama", _rope("linear", factor=4.0)),
    "llama rope dynamic": Case(
        "Llama", _rope("dynamic", factor=2.0) | {"max_position_embeddings": 128}
    ),
    "llama rope yarn": Case(
        "Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)
    ),
    "llama rope yarn mscale": Case(
        "Llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=128,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=16.0,
            beta_slow=2.0,
        ),
    ),
    "llama rope yarn attention_factor": Case(
        "Llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=128,
            attention_factor=1.2,
            truncate=False,
        ),
    ),
    "llama rope longrope": Case(
        "Llama",
        _rope(
            "longrope",
            original_max_position_embeddings=16,  # shorter than every prompt of the tests
            short_factor=[1.0 + 0.01 * i for i in range(8)],
            long_factor=[1.0 + 0.5 * i for i in range(8)],
        ),
    ),
    "mistral": Case("Mistral", {"sliding_window": None}),
    "mistral sliding": Case("Mistral", {"sliding_window": 24}),
    "qwen2": Case("Qwen2"),
    "qwen2 tied": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 sliding from layer 1": Case(
        "Qwen2", _layers(3, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    ),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "qwen3 rounded tied": Case(
        "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, rounded=True
    ),
    "qwen3 tied biases": Case(
        "Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}
    ),
    "qwen3 sliding by layer": Case(
        "Qwen3",
        _layers(
            3,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "gemma2": Case(
        "Gemma2", _gemma(attn_logit_softcapping=3.0, final_logit_softcapping=5.0), in_half=True
    ),
    "gemma2 untied": Case(
        "Gemma2", _gemma() | {"tie_word_embeddings": False, "attention_bias": True}
    ),
    "gemma3": Case("Gemma3Text", _gemma(layer_types=_KINDS), in_half=True),
    "gemma3 ropes": Case(
        "Gemma3Text",
        _gemma(
            layer_types=_KINDS,
            final_logit_softcapping=5.0,
            rope_parameters={"full_attention": _LINEAR_ROPE, "sliding_attention": _LOCAL_ROPE},
        ),
    ),
    "gemma3 multimodal": Case(
        "Gemma3",
        _gemma(layer_types=_KINDS),
        model="ForConditionalGeneration",
        others={"vision_config": _VISION, "mm_tokens_per_image": 4, "image_token_index": 127},
    ),
    "gemma3 multimodal untied": Case(
        "Gemma3",
        _gemma(layer_types=_KINDS),
        model="ForConditionalGeneration",
        others={
            "vision_config": _VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 127,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3 by pattern": Case("Gemma3Text", _gemma(sliding_window_pattern=2)),
    "gemma4": Case("Gemma4Text", _GEMMA4, in_half=True),
    "gemma4 large": Case("Gemma4Text", _GEMMA4_LARGE, in_half=True),
    "gemma4 large untied biases": Case(
        "Gemma4Text",
        _GEMMA4_LARGE | {"tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma4 values from keys biases": Case(
        "Gemma4Text", _GEMMA4 | {"attention_k_eq_v": True, "attention_bias": True}
    ),
    "gemma4 ropes": Case(
        "Gemma4Text",
        _GEMMA4
        | {"rope_parameters": {"full_attention": _LINEAR_ROPE, "sliding_attention": _LOCAL_ROPE}},
    ),
    "gemma4 multimodal": Case(
        "Gemma4",
        _GEMMA4,
        model="ForConditionalGeneration",
        others={"vision_config": _GEMMA_ENCODER, "audio_config": None},
    ),
    "gemma4 unified": Case(
        "Gemma4Unified",
        {it: value for it, value in _GEMMA4_LARGE.items() if it != "hidden_size_per_layer_input"},
        model="ForConditionalGeneration",
        others={"vision_config": None, "audio_config": None},
    ),
    "gemma4 unified text": Case(
        "Gemma4UnifiedText",
        {it: value for it, value in _GEMMA4_LARGE.items() if it != "hidden_size_per_layer_input"},
    ),
    "gemma3n": Case("Gemma3nText", _GEMMA3N, in_half=True),
    "gemma3n second stream untied biases": Case(
        "Gemma3nText",
        _GEMMA3N
        | {"altup_active_idx": 1, "altup_num_inputs": 3, "altup_correct_scale": False}
        | {"tie_word_embeddings": False, "attention_bias": True, "num_kv_shared_layers": 0},
    ),
    "gemma3n multimodal": Case("Gemma3nText", _GEMMA3N, restated=_GEMMA3N_MULTIMODAL),
    "gpt2": Case("GPT2", model="LMHeadModel", in_half=True),
    "gpt2 sharded": Case("GPT2", shard_size="40KB", model="LMHeadModel"),
    "gpt2 untied": Case(
        "GPT2",
        {"n_inner": 96, "activation_function": "gelu", "tie_word_embeddings": False},
        model="LMHeadModel",
    ),
    "opt": Case("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}, in_half=True),
    "opt untied": Case(
        "OPT",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": False}
        | {"activation_function": "gelu_new"},
    ),
    "opt without biases": Case(
        "OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "enable_bias": False}
    ),
    "granite": Case("Granite", _GRANITE, in_half=True),
    "granite tied biases": Case(
        "Granite",
        _GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "starcoder2": Case("Starcoder2", {"sliding_window": 24}, in_half=True),
    "starcoder2 untied without biases": Case(
        "Starcoder2", {"tie_word_embeddings": False, "use_bias": False}
    ),
    "gemma1": Case("Gemma", {"num_key_value_heads": 1, "head_dim": 24}, in_half=True),
    "gemma1 untied biases": Case(
        "Gemma",
        {"head_dim": 24, "hidden_act": "gelu", "attention_bias": True}
        | {"tie_word_embeddings": False},
    ),
    "phi3": Case("Phi3", {"sliding_window": 23}, in_half=True),
    # The original context is shorter than every prompt of the tests.
    "phi3 longrope": Case("Phi3", longrope(8, 16) | {"sliding_window": 512}),
    "phi3 partial longrope tied": Case(
        "Phi3",
        longrope(6, 16) | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
        in_half=True,
    ),
    "smollm3": Case("SmolLM3", _layers(4), in_half=True),
    "smollm3 windows untied biases": Case(
        "SmolLM3",
        _layers(
            4,
            use_sliding_window=True,
            sliding_window=16,
            no_rope_layers=[0, 1, 0, 1],
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "smollm3 windows by layer": Case(
        "SmolLM3",
        _layers(
            3,
            use_sliding_window=True,
            sliding_window=16,
            no_rope_layer_interval=2,
            layer_types=_KINDS,
        ),
    ),
    "olmo2": Case("Olmo2", in_half=True),
    "olmo2 head_dim tied biases": Case(
        "Olmo2", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "qwen3 vl": Case(
        "Qwen3VL",
        {"head_dim": 24, **_mrope([4, 4, 4], mrope_interleaved=True)},
        model="ForConditionalGeneration",
        others={"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}},
    ),
    "qwen3 vl tied biases": Case(
        "Qwen3VL",
        {"head_dim": 16, "attention_bias": True, **_mrope([4, 2, 2], mrope_interleaved=True)},
        model="ForConditionalGeneration",
        others={
            "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5 vl": Case(
        "Qwen2_5_VL",
        _mrope([2, 3, 3]),
        model="ForConditionalGeneration",
        others={"vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0]}},
    ),
    "qwen2 vl tied windows": Case(
        "Qwen2VL",
        _layers(3, use_sliding_window=True, sliding_window=16, max_window_layers=1)
        | _mrope([2, 3, 3]),
        model="ForConditionalGeneration",
        others={"vision_config": _QWEN_VISION | {"embed_dim": 32}, "tie_word_embeddings": True},
    ),
    "mistral3": Case(
        "Mistral3",
        {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
        model="ForConditionalGeneration",
        others={"vision_config": _PIXTRAL, "tie_word_embeddings": False},
    ),
    "mistral3 ministral tied": Case(
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 16, **_ministral(32)},
        model="ForConditionalGeneration",
        others={"vision_config": _PIXTRAL, "tie_word_embeddings": True},
        in_half=True,
    ),
    "ministral3": Case("Ministral3", {"head_dim": 16, **_ministral(48)}, in_half=True),
    "ministral3 windows": Case(
        "Ministral3",
        {"head_dim": 16, "sliding_window": 24, "tie_word_embeddings": True, **_ministral(16)},
    ),
    "ministral": Case("Ministral", _layers(3, layer_types=_KINDS, sliding_window=16, head_dim=24)),
    "olmo3": Case("Olmo3", _layers(4, sliding_window=16), in_half=True),
    "olmo3 yarn tied biases": Case(
        "Olmo3",
        _layers(
            3,
            layer_types=_KINDS,
            sliding_window=24,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
    ),
    "exaone4": Case("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "exaone4 hybrid": Case("Exaone4", _layers(4, sliding_window=16), in_half=True),
    "exaone4 hybrid tied head_dim": Case(
        "Exaone4",
        _layers(3, sliding_window=16, layer_types=_KINDS, head_dim=24, tie_word_embeddings=True),
    ),
    "exaone": Case("Exaone", named="LlamaForCausalLM"),
    "exaone tied rope llama3": Case(
        "Exaone",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        )
        | {"tie_word_embeddings": True},
        named="LlamaForCausalLM",
    ),
    "ernie4.5": Case("Ernie4_5", {"head_dim": 24}, in_half=True),
    "ernie4.5 untied biases": Case(
        "Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}
    ),
    "seed oss": Case("SeedOss", {"head_dim": 24}, in_half=True),
    "seed oss biases tied": Case(
        "SeedOss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}
        | {"tie_word_embeddings": True, "head_dim": 16},
    ),
    "arcee": Case("Arcee", in_half=True),
    "arcee biases tied": Case(
        "Arcee", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "hunyuan": Case("HunYuanDenseV1", {"head_dim": 16}, in_half=True),
    "hunyuan alpha tied biases": Case(
        "HunYuanDenseV1",
        {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}
        | _rope("dynamic", alpha=100.0, factor=1.0),
    ),
    "apertus": Case("Apertus", {"max_position_embeddings": 16384}, in_half=True),
    "apertus rope biases tied": Case(
        "Apertus",
        {"attention_bias": True, "tie_word_embeddings": True} | _rope("linear", factor=2.0),
    ),
    "helium": Case("Helium", {"head_dim": 16}, in_half=True),
    "helium biases tied": Case(
        "Helium",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "nemotron": Case("Nemotron", in_half=True),
    "nemotron biases tied": Case(
        "Nemotron",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24}
        | _rope("default", partial_rotary_factor=0.25),
    ),
    "internlm3": Case(
        "InternLM3",
        {"head_dim": 16, "qkv_bias": True, "bias": True} | _rope("dynamic", factor=6.0),
        named="LlamaForCausalLM",
    ),
    "cwm": Case("Cwm", _CWM),
    "qwen3.5": Case("Qwen3_5Text", _QWEN3_5, in_half=True),
    "qwen3.5 more value heads tied biases": Case(
        "Qwen3_5Text",
        _QWEN3_5
        | _layers(3, layer_types=["full_attention", "linear_attention", "linear_attention"])
        | {"linear_num_value_heads": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3.5 vl": Case(
        "Qwen3_5",
        _QWEN3_5 | _mrope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.5),
        model="ForConditionalGeneration",
        others={"vision_config": _QWEN_VISION | {"num_position_embeddings": 16}},
    ),
    "granite4": Case(
        "GraniteMoeHybrid",
        _layers(3, layer_types=["mamba", "attention", "mamba"], **_GRANITE4),
        in_half=True,
    ),
    "granite4 rope tied biases groups": Case(
        "GraniteMoeHybrid",
        _layers(2, layer_types=["attention", "mamba"], **_GRANITE4)
        | {"position_embedding_type": "rope", "attention_bias": True, "mamba_proj_bias": True}
        | {"mamba_n_groups": 2, "tie_word_embeddings": True},
    ),
    "granite4 without mamba": Case(
        "GraniteMoeHybrid",
        _layers(2, layer_types=["attention"] * 2, **_GRANITE4)
        | {"position_embedding_type": "rope"},
    ),
    "bamba": Case("Bamba", {**_MAMBA, **_layers(3, attn_layer_indices=[1])}, in_half=True),
    "bamba tied biases groups": Case(
        "Bamba",
        {**_MAMBA, **_layers(2, attn_layer_indices=[0], mamba_n_groups=4)}
        | dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias"), True)
        | {"tie_word_embeddings": True, "head_dim": 24},
    ),
    "falcon h1": Case("FalconH1", _FALCON_H1, in_half=True),
    "falcon h1 norm tied biases": Case(
        "FalconH1",
        _FALCON_H1
        | dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)
        | {"mamba_rms_norm": True, "mamba_n_groups": 2, "tie_word_embeddings": True},
    ),
    "falcon h1 norm after gate": Case(
        "FalconH1",
        _FALCON_H1
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "projectors_bias": True}
        | {"mamba_d_ssm": None, "mamba_conv_bias": False},
    ),
    "lfm2": Case("Lfm2", _LFM2, in_half=True),
    "lfm2 vl": Case(
        "Lfm2Vl",
        {"model_type": "lfm2", **_LFM2},
        model="ForConditionalGeneration",
        others={
            "vision_config": _VISION | {"model_type": "siglip2_vision_model", "num_patches": 16}
        },
    ),
    "lfm2 untied biases": Case(
        "Lfm2",
        _LFM2
        | _layers(3, layer_types=["conv", "full_attention", "conv"], full_attn_idxs=None)
        | {"conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False},
    ),
    "minicpm": Case("Granite", _minicpm(4), restated=_MINICPM),
    "minicpm longrope tied": Case(
        "Granite",
        _minicpm(4) | longrope(8, 16) | {"tie_word_embeddings": True},
        restated=_MINICPM | {"tie_word_embeddings": None},
    ),
    "aquila": Case("Llama", restated=_named("AquilaForCausalLM", "aquila")),
    "xverse": Case("Llama", restated=_named("XverseForCausalLM", "xverse")),
    "yi": Case("Llama", restated=_named("YiForCausalLM", "Yi")),
    "stablelm": Case("StableLm", in_half=True),
    "stablelm biases tied": Case(
        "StableLm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    ),
    "stablelm parallel": Case("StableLm", {"use_parallel_residual": True}),
    "gpt_neox": Case("GPTNeoX", in_half=True),
    "gpt_neox sequential tied without biases": Case(
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_fast",
            "rotary_pct": 1.0,
            "rotary_emb_base": 500,
        },
    ),
    "gptj": Case("GPTJ", {"rotary_dim": 8}, in_half=True),
    "gptj whole heads tied": Case(
        "GPTJ", {"rotary_dim": 16, "tie_word_embeddings": True, "n_inner": 96}
    ),
    "phi": Case("Phi", {"num_key_value_heads": 4}, in_half=True),
    "phi few key-value heads tied": Case(
        "Phi", {"partial_rotary_factor": 0.25, "tie_word_embeddings": True}
    ),
    "cohere": Case("Cohere", {"logit_scale": 0.25}, in_half=True),
    "cohere norms by head": Case("Cohere", {"use_qk_norm": True}, in_half=True),
    "cohere untied biases": Case(
        "Cohere", {"attention_bias": True, "tie_word_embeddings": False, "logit_scale": 2.0}
    ),
    "cohere2": Case("Cohere2", _layers(4, sliding_window=16, logit_scale=0.25), in_half=True),
    "cohere2 windows by layer biases": Case(
        "Cohere2", _layers(3, sliding_window=16, layer_types=_KINDS, attention_bias=True)
    ),
    "falcon": Case("Falcon", {"ffn_hidden_size": 96}, in_half=True),
    "falcon few key-value heads biases": Case(
        "Falcon",
        {
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "num_kv_heads": 2,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon sequential all heads": Case(
        "Falcon", {"parallel_attn": False, "multi_query": False, "bias": True}
    ),
    "gpt_bigcode": Case("GPTBigCode", in_half=True),
    "gpt_bigcode all heads untied": Case(
        "GPTBigCode", {"multi_query": False, "n_inner": 96, "tie_word_embeddings": False}
    ),
}
