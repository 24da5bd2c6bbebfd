"""Families that are Llama under another name."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

from model.families import llama, parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.tensors import LLAMA
from model.network.spec import Network


def _network(architecture: str, keys: Keys) -> Network:
    """Return the network of a config.json."""
    parts.check_code(keys, architecture)
    return llama.network(keys)


def _family(architecture: str, model_type: str) -> Family:
    return Family(architecture, model_type, functools.partial(_network, architecture))


FAMILIES: Final = (
    dataclasses.replace(_family("AquilaForCausalLM", "aquila"), also=("AquilaModel",)),
    _family("XverseForCausalLM", "xverse"),
    dataclasses.replace(
        _family("YiForCausalLM", "Yi"),
        # As the first files of Yi have them.
        tensors=dataclasses.replace(
            LLAMA, layer_aliases={"ln1": "input_layernorm", "ln2": "post_attention_layernorm"}
        ),
        defaults={"rope_theta": 5_000_000.0, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    ),
)
