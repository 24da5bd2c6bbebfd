"""EXAONE 3 and 3.5: Llama with other names of tensors and keys."""

from __future__ import annotations

from typing import Final

from model.families import llama
from model.families.family import Family
from model.families.keys import Keys
from model.families.tensors import HEAD, Tensors
from model.network.spec import Network

_TENSORS: Final = Tensors(
    {"embed_tokens": "wte", "norm": "ln_f", HEAD: HEAD},
    {
        "input_norm": "ln_1",
        "q": "attn.attention.q_proj",
        "k": "attn.attention.k_proj",
        "v": "attn.attention.v_proj",
        "output": "attn.attention.out_proj",
        "mlp_norm": "ln_2",
        "gate": "mlp.c_fc_0",
        "up": "mlp.c_fc_1",
        "down": "mlp.c_proj",
    },
    prefix="transformer.",
    layers="h.",
)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    return llama.network(keys)


FAMILY: Final = Family(
    "ExaoneForCausalLM",
    "exaone",
    network,
    _TENSORS,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
    also=("LlamaForCausalLM",),
    synonyms={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
)
