"""Language models that are a part of a multimodal model, for text alone: the names of tensors, and the tied head."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families.tensors import Tensors

_PREFIX: Final = "model.language_model."
_OTHERS: Final = (
    "visual.", "vision_tower.", "vision_embedder.", "multi_modal_projector.", "audio_tower.", "embed_vision.",
    "embed_audio.",
)  # fmt: skip
"""Prefixes of the tensors of what reads images and audio."""


def wrapped_tensors(tensors: Tensors) -> Tensors:
    """Return the tensors of a language model within a multimodal model, by all names that files have."""
    return dataclasses.replace(
        tensors,
        prefix=_PREFIX,
        aliases={
            _PREFIX: _PREFIX,
            "language_model.lm_head.": "lm_head.",
            "language_model.model.": _PREFIX,
            "language_model.": _PREFIX,
            "model.": _PREFIX,
            # Without any prefix.
            tensors.layers: _PREFIX + tensors.layers,
            **{
                f"{name}.": f"{_PREFIX}{name}."
                for module, name in tensors.modules.items()
                if module != "lm_head"
            },
        },
        ignored=(*_OTHERS, *(f"model.{it}" for it in _OTHERS)),
    )


def tied_by_the_model(outer: bool | None, inner: bool | None) -> bool | None:
    """Return what the multimodal model states, or what its language model does where it states nothing."""
    return inner if outer is None else outer


def tied_by_either(outer: bool | None, inner: bool | None) -> bool | None:
    """Return whether either place states that the head is tied; None if neither states anything."""
    return None if outer is None and inner is None else bool(outer or inner)


def tied_by_both(outer: bool | None, inner: bool | None) -> bool | None:
    """Return whether no place states that the head is not tied; None if the language model states nothing else."""
    return False if outer is False else inner
