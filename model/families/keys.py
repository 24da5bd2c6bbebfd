"""Reads the keys of config.json, and refuses those of unsupported features that no family has read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from model.errors import ModelFolderError
from model.json_input import Harmless, check, refuse, shorten

_UNSUPPORTED: Final[Harmless] = (
    ((False,), ("is_encoder_decoder", "add_cross_attention", "use_mrope")),
    ((0,), ("n_routed_experts",)),
    ((0, 1), ("num_local_experts", "num_experts")),
    ((1,), ("partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")),
    ((0,), ("attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "attention_chunk_size",
            "clip_qkv")),
    ((), ("attention_multiplier", "no_rope_layers", "dual_chunk_attention_config",
          "mrope_section", "full_attention", "sliding_attention", "short_mscale", "long_mscale")),
)  # fmt: skip
"""Keys of features that most families lack, each group after the values with which its keys have no effect."""

_TOKEN_IDS: Final = int | list[int]
_INFINITY: Final = {"__float__": "Infinity"}
_PAIR: Final = Meta(min_length=2, max_length=2)


class Keys:
    """A JSON object of config.json whose values are checked as they are read.

    Null stands for an absent key. All methods raise `ModelFolderError`, which names the key, what is allowed and the
    value, for a value of the wrong type or outside its limits, and for an absent value without a default.

    Args:
        content: the object.
        renamed: the keys of a family that have another name than Llama's, by Llama's. Methods take Llama's names;
            errors show the family's.
        prefix: added in errors before each key, such as "rope_scaling.".

    Attributes:
        notes: sentences about values that have no effect.
    """

    def __init__(
        self, content: Mapping[str, Any], renamed: Mapping[str, str] | None = None, prefix: str = ""
    ) -> None:
        self._content, self._renamed, self._prefix = content, renamed or {}, prefix
        self._read: set[str] = set()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Note that a value has no effect, for a warning.

        Args:
            text: a sentence that begins with the key, in the family's spelling.
        """
        self.notes.append(f"{self._prefix}{text}")

    def integer(self, key: str, limits: Meta, default: int | None = None) -> int:
        """Return a whole number."""
        return int(self._required(key, Annotated[int, limits], default))

    def optional_integer(self, key: str, limits: Meta, absent: int | None = None) -> int | None:
        """Return a whole number; `absent` for an absent key, None for null."""
        value: int | None = self._optional(key, Annotated[int, limits], absent)
        return value

    def optional_integers(self, key: str, limits: Meta) -> list[int] | None:
        """Return a list of whole numbers, or None."""
        value: list[int] | None = self._optional(key, list[Annotated[int, limits]], None)
        return value

    def number(self, key: str, limits: Meta, default: float | None = None) -> float:
        """Return a number."""
        return float(self._required(key, Annotated[float, limits], default))

    def optional_number(self, key: str, limits: Meta, absent: float | None = None) -> float | None:
        """Return a number; `absent` for an absent key, None for null."""
        value: float | None = self._optional(key, Annotated[float, limits], absent)
        return value

    def numbers(
        self, key: str, limits: Meta, default: tuple[float, ...] | None = None
    ) -> tuple[float, ...]:
        """Return a list of numbers, as many as `default` has.

        Raises:
            ModelFolderError: the list has another length.
        """
        found = tuple(self._required(key, list[Annotated[float, limits]], default))
        if default is not None and len(found) != len(default):
            raise ModelFolderError(
                f"{self.name(key)} must have {len(default)} numbers, found {len(found)}"
            )
        return found

    def bounds(self, key: str, limits: Meta) -> tuple[float, float] | None:
        """Return a least and a largest number, which may be infinite; None if they are absent.

        transformers 5 writes {"__float__": "Infinity"} for what other files have as Infinity.
        """
        value = self._find(key)
        if value is None:
            return None
        name = self.name(key)
        stated = [math.inf if it == _INFINITY else it for it in check(value, list[Any], name)]
        low, high = check(stated, Annotated[list[Annotated[float, limits]], _PAIR], name)
        if not low <= high:
            raise ModelFolderError(
                f"{name} must be a smaller and a larger number, found {shorten(value)}"
            )
        return low, high

    def for_layers(self, key: str, limits: Meta, default: list[float]) -> list[float]:
        """Return the numbers of all layers, from a list or one number for all; `default` has as many as layers.

        Raises:
            ModelFolderError: the list has another length.
        """
        value = self._find(key)
        if value is None:
            return default
        if not isinstance(value, list):
            return [check(value, Annotated[float, limits], self.name(key))] * len(default)
        found: list[float] = check(value, list[Annotated[float, limits]], self.name(key))
        if len(found) != len(default):
            raise ModelFolderError(
                f"{self.name(key)} must have a number for each of {len(default)} layers, found {len(found)}"
            )
        return found

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return true or false."""
        return bool(self._required(key, bool, default))

    def text_or_integer(self, key: str, limits: Meta, default: str | int) -> str | int:
        """Return a string or a whole number."""
        value: str | int = self._required(key, str | Annotated[int, limits], default)
        return value

    def text(self, key: str) -> str | None:
        """Return a string, or None."""
        value: str | None = self._optional(key, str, None)
        return value

    def texts(self, key: str) -> list[str] | None:
        """Return a list of strings, or None."""
        value: list[str] | None = self._optional(key, list[str], None)
        return value

    def token_ids(self, key: str, vocab: int) -> tuple[int, ...]:
        """Return one token id or a list of them; none if they are absent. Ids outside the vocabulary are only noted."""
        ids = self._optional(key, _TOKEN_IDS, None)
        listed = () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)
        if outside := [it for it in listed if not 0 <= it < vocab]:
            self.note(
                f"{self._renamed.get(key, key)} has {shorten(outside)}, which are not among the token ids from 0 to"
                f" {vocab - 1} and cannot occur; they are ignored"
            )
        return tuple(it for it in listed if 0 <= it < vocab)

    def inner(self, key: str) -> Keys | None:
        """Return the object of a key, or None if it is absent or empty."""
        value = self._find(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise ModelFolderError(f"{self.name(key)} must be an object, found {shorten(value)}")
        return Keys(value, prefix=f"{self.name(key)}.")

    def require(self, key: str, *values: object) -> None:
        """Check that a key is absent or has one of some values.

        Raises:
            UnsupportedModelError: it has another one.
        """
        refuse({self.name(key): self._find(key)}, ((values, (self.name(key),)),))

    def accept(self, *keys: str) -> None:
        """Let keys have any value, because they do not change what the network computes."""
        for key in keys:
            self._find(key)

    def refuse_unread(self) -> None:
        """Check that no key that was not read enables a feature.

        Raises:
            UnsupportedModelError: a key does.
        """
        unread = {
            key: it
            for key, it in self._content.items()
            if key not in self._read and not _is_empty(it)
        }
        if _all_are_one(unread.get("no_rope_layers")):
            del unread["no_rope_layers"]  # every layer rotates
        refuse(unread, _UNSUPPORTED, self._prefix)

    def refuse_others(self) -> None:
        """Check that all keys were read.

        Raises:
            UnsupportedModelError: one was not.
        """
        refuse(
            {key: it for key, it in self._content.items() if key not in self._read},
            (((), tuple(self._content)),),
            self._prefix,
        )

    def name(self, key: str) -> str:
        """Return the name of a key in errors."""
        return self._prefix + self._renamed.get(key, key)

    def _find(self, key: str) -> Any:  # noqa: ANN401 - any JSON value
        stated = self._renamed.get(key, key)
        self._read.add(stated)
        return self._content.get(stated)

    def _required(self, key: str, kind: object, default: object) -> Any:  # noqa: ANN401 - any JSON value
        value = self._find(key)
        if value is not None:
            return check(value, kind, self.name(key))
        if default is None:
            raise ModelFolderError(f"{self.name(key)} is missing")
        return default

    def _optional(self, key: str, kind: object, absent: object) -> Any:  # noqa: ANN401 - any JSON value
        value = self._find(key)
        if value is not None:
            return check(value, kind, self.name(key))
        return None if self._renamed.get(key, key) in self._content else absent


def _all_are_one(value: object) -> bool:
    return isinstance(value, list) and all(it == 1 for it in value)


def _is_empty(value: object) -> bool:
    """Whether a value states nothing, whatever its key is; 0 does, since 0 times something is another function."""
    return value is False or (not value and isinstance(value, str | list | dict))
