"""The language model of Qwen3-VL (dense), for text alone; its image encoder is not loaded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

from model.families import qwen3
from model.families.wrapped import wrapped_tensors

FAMILY: Final = dataclasses.replace(
    qwen3.FAMILY,
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    network=functools.partial(qwen3.network, sections=True),
    tensors=wrapped_tensors(qwen3.FAMILY.tensors),
    part="text_config",
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
    },
)
