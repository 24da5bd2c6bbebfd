"""The language model of Qwen2.5-VL, for text alone; its image encoder is not loaded."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import qwen2_vl

FAMILY: Final = dataclasses.replace(
    qwen2_vl.FAMILY, architecture="Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl"
)
