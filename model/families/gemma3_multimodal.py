"""The language model of a multimodal Gemma 3, 4B and larger; its image encoder is not loaded."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gemma3
from model.families.wrapped import tied_by_both, wrapped_tensors

FAMILY: Final = dataclasses.replace(
    gemma3.FAMILY,
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    tensors=wrapped_tensors(gemma3.FAMILY.tensors),
    part="text_config",
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
    tied=tied_by_both,
)
