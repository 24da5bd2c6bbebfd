"""The language model of a multimodal Gemma 4; its encoders of images and audio are not loaded."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import gemma4
from model.families.wrapped import tied_by_both, wrapped_tensors

FAMILY: Final = dataclasses.replace(
    gemma4.FAMILY,
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    tensors=wrapped_tensors(gemma4.FAMILY.tensors),
    part="text_config",
    tied=tied_by_both,
)
