"""The language model of Qwen3.5 (dense), for text alone; its image encoder is not loaded."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import qwen3_5_text
from model.families.wrapped import wrapped_tensors

_TEXT: Final = qwen3_5_text.FAMILY
_WRAPPED: Final = wrapped_tensors(_TEXT.tensors)
FAMILY: Final = dataclasses.replace(
    _TEXT,
    architecture="Qwen3_5ForConditionalGeneration",
    model_type="qwen3_5",
    tensors=dataclasses.replace(
        _WRAPPED, ignored=tuple(dict.fromkeys((*_WRAPPED.ignored, *_TEXT.tensors.ignored)))
    ),
    part="text_config",
)
