"""The work that every contender does."""

from __future__ import annotations

import dataclasses
from typing import Final

import msgspec


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The sizes of the measurements.

    Attributes:
        streams: numbers of sequences that are decoded together.
        prompt: prompt tokens of each of them.
        tokens: new tokens of each of them.
        prefills: lengths of the single prompts whose processing is measured.
    """

    streams: tuple[int, ...] = (1, 4, 8)
    prompt: int = 32
    tokens: int = 128
    prefills: tuple[int, ...] = (128, 512)

    def encode(self) -> str:
        """Return the work as JSON, for the command line of another process."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> Work:
        """Read what `encode` wrote."""
        return msgspec.json.decode(text, type=cls)


QUANTIZED: Final = {"none": "BF16", "int8": "Q8_0", "int4": "Q4_0", "auto": "Q8_0"}
"""llama.cpp's format to compare with, by the value of `--quantization`."""
FORMATS: Final = ("Q8_0", "Q4_0", "BF16")
"""llama.cpp's formats beside `--quantization`, each for all matrices of a file."""
FILE_FORMATS: Final = ("Q8_0", "Q4_0", "Q4_1", "Q4_K_M")
"""Formats of the files that Tessera and llama.cpp both read, as they are on the Hub: each mixes types."""
OTHER_FILE_FORMATS: Final = (
    "Q6_K",
    "Q5_K_M",
    "Q5_K_S",
    "Q5_1",
    "Q5_0",
    "Q4_K_S",
    "Q3_K_M",
    "IQ4_NL",
    "IQ4_XS",
    "BF16",
)
"""Others that can be chosen."""
