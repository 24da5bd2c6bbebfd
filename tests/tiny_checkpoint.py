"""A decoder with random weights, small enough to run a thousand steps per second."""

import json

import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.save import save_checkpoint
from model.decoder import DecoderLM

VOCAB_SIZE = 260

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}


def write_tiny_checkpoint(folder, **changes):
    """Write config.json, with `changes`, and weights to `folder`; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_CONFIG | changes))
    config = ModelConfig.from_folder(folder)
    model = DecoderLM(config)
    model.init_weights(std=0.3, seed=0)
    save_checkpoint(model.to(torch.float32), folder, 1 << 20)
    return folder
