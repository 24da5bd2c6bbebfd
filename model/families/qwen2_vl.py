"""The language model of Qwen2-VL, for text alone; its image encoder is not loaded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

from model.families import qwen2
from model.families.wrapped import tied_by_either, wrapped_tensors

FAMILY: Final = dataclasses.replace(
    qwen2.FAMILY,
    architecture="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    network=functools.partial(qwen2.network, sections=True),
    tensors=wrapped_tensors(qwen2.FAMILY.tensors),
    part="text_config",
    defaults={
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    tied=tied_by_either,
)
