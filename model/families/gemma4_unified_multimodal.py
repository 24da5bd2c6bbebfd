"""The language model of a multimodal Gemma 4 without encoders; what embeds images and audio is not loaded."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gemma4_multimodal, gemma4_unified

FAMILY: Final = dataclasses.replace(
    gemma4_multimodal.FAMILY,
    architecture="Gemma4UnifiedForConditionalGeneration",
    model_type="gemma4_unified",
    defaults=gemma4_unified.FAMILY.defaults,
)
