"""Rearranges documents for fill-in-the-middle: a prefix and a suffix are given, the middle is what follows.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"; Fried et al. 2022,
"InCoder"; Li et al. 2023, "StarCoder".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from model.training.tokenization import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX

SPM_SHARE = 0.25
"""Share of documents with the suffix before the prefix (SPM); the others have it after (PSM), as most editors ask."""
LINES_SHARE = 0.5
"""Share of documents whose middle ends with a line, most often its first; the others are cut at random characters."""
MAX_CHARACTERS = 4_000
"""Longer documents are cut at line ends first, so that prefix, suffix and middle fit into one row."""
MIN_CHARACTERS = 20


def infilling_documents(texts: Sequence[str], copies: int, seed: int) -> Iterator[str]:
    """Yield every text rearranged, each time with other cuts.

    Args:
        texts: the documents.
        copies: how often each one is used.
        seed: chooses the cuts.
    """
    generator = np.random.default_rng(seed)
    for _ in range(copies):
        for text in texts:
            for chunk in chunks(text):
                if len(chunk) >= MIN_CHARACTERS:
                    yield rearrange(chunk, generator)


def rearrange(text: str, generator: np.random.Generator) -> str:
    """Cut a text at two places and put the middle last.

    Cuts at characters, not at tokens, since an editor asks wherever the cursor is. SPM puts the prefix next to the
    middle: `<|fim_prefix|><|fim_suffix|>` suffix `<|fim_middle|>` prefix middle.
    """
    cut = _cut_lines if generator.random() < LINES_SHARE else _cut_anywhere
    first, last = cut(text, generator)
    prefix, middle, suffix = text[:first], text[first:last], text[last:]
    return infilling_prompt(prefix, suffix, spm=generator.random() < SPM_SHARE) + middle


def _cut_anywhere(text: str, generator: np.random.Generator) -> tuple[int, int]:
    first, last = sorted(generator.integers(0, len(text) + 1, 2).tolist())
    return first, last


def _cut_lines(text: str, generator: np.random.Generator) -> tuple[int, int]:
    """Cut from a character, in half of the cases the first of its line, to the end of one of the next lines.

    The line end is in the middle in half of the cases, else in the suffix.
    """
    first = int(generator.integers(0, len(text) + 1))
    if generator.random() < 0.5:
        first = text.rfind("\n", 0, first) + 1
    last = first
    for _ in range(generator.geometric(0.5)):
        last = text.find("\n", last) + 1 or len(text)
    if generator.random() < 0.5 and text[first:last].endswith("\n"):
        last -= 1
    return first, last


def infilling_prompt(prefix: str, suffix: str, *, spm: bool = False) -> str:
    """Return the prompt, in PSM or SPM, that asks for the text between a prefix and a suffix."""
    if spm:
        return f"{FIM_PREFIX}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}{prefix}"
    return f"{FIM_PREFIX}{prefix}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}"


def chunks(text: str) -> Iterator[str]:
    """Yield a text in parts of at most `MAX_CHARACTERS`, cut after line ends where there are any."""
    while len(text) > MAX_CHARACTERS:
        cut = text.rfind("\n", 0, MAX_CHARACTERS) + 1 or MAX_CHARACTERS
        yield text[:cut]
        text = text[cut:]
    yield text
