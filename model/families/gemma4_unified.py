"""Gemma 4 of the models that read images and audio without encoders (text): as Gemma 4, without per-layer inputs."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gemma4

FAMILY: Final = dataclasses.replace(
    gemma4.FAMILY,
    architecture="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    defaults={
        **gemma4.FAMILY.defaults,
        "hidden_size_per_layer_input": 0,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
    },
)
