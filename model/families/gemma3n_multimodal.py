"""The language model of a multimodal Gemma 3n; its encoders of images and audio are not loaded."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gemma3n
from model.families.wrapped import tied_by_both, wrapped_tensors

FAMILY: Final = dataclasses.replace(
    gemma3n.FAMILY,
    architecture="Gemma3nForConditionalGeneration",
    model_type="gemma3n",
    tensors=wrapped_tensors(gemma3n.FAMILY.tensors),
    part="text_config",
    tied=tied_by_both,
)
