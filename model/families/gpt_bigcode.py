"""StarCoder 1, SantaCoder and StarCoderBase: GPT-2 with one key-value head."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gpt2
from model.families.family import Family
from model.families.keys import Keys
from model.network.spec import Network

_TENSORS: Final = dataclasses.replace(gpt2.TENSORS, transposed=False, grouped_qkv=True)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    return gpt2.decoder(keys, one_kv_head=keys.flag("multi_query", default=True))


FAMILY: Final = Family(
    "GPTBigCodeForCausalLM",
    "gpt_bigcode",
    network,
    _TENSORS,
    renamed=gpt2.RENAMED,
    defaults={"activation_function": "gelu_pytorch_tanh"},
)
