"""The language model of LFM2-VL, for text alone; its image encoder is not loaded."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import lfm2
from model.families.wrapped import wrapped_tensors

FAMILY: Final = dataclasses.replace(
    lfm2.FAMILY,
    architecture="Lfm2VlForConditionalGeneration",
    model_type="lfm2_vl",
    tensors=wrapped_tensors(lfm2.FAMILY.tensors),
    part="text_config",
    defaults={
        **lfm2.FAMILY.defaults,
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
)
