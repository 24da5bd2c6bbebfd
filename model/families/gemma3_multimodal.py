"""The language model of a multimodal Gemma 3, 4B and larger; its image encoder is not loaded."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gemma3

_PREFIX: Final = "language_model.model."

FAMILY: Final = dataclasses.replace(
    gemma3.FAMILY,
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    tensors=dataclasses.replace(
        gemma3.FAMILY.tensors,
        modules={**gemma3.FAMILY.tensors.modules, "lm_head": "language_model.lm_head"},
        prefix=_PREFIX,
        aliases={
            "model.language_model.": _PREFIX,
            "lm_head.": "language_model.lm_head.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        },
        ignored=("vision_tower.", "multi_modal_projector."),
    ),
    part="text_config",
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
)
