"""Families that are Llama under another name."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import llama
from model.families.family import Family
from model.families.tensors import LLAMA

FAMILIES: Final = (
    Family("AquilaForCausalLM", "aquila", llama.network, also=("AquilaModel",)),
    Family("XverseForCausalLM", "xverse", llama.network),
    Family(
        "YiForCausalLM",
        "Yi",
        llama.network,
        # As the first files of Yi have them.
        tensors=dataclasses.replace(
            LLAMA, layer_aliases={"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
        ),
        defaults={"rope_theta": 5_000_000.0, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    ),
)
