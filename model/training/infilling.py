"""Rearranges documents for fill-in-the-middle: a prefix and a suffix are given, the middle is what follows.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"; Fried et al. 2022,
"InCoder"; Li et al. 2023, "StarCoder".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from model.training.tokenization import FIM_MIDDLE, FIM_PREFIX, FIM_SUFFIX

SPM_SHARE = 0.5
"""Share of documents with the suffix before the prefix (SPM); the others have it after (PSM)."""
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
    """Cut a text at two random characters and put the middle last.

    Cuts at characters, not at tokens, since an editor asks wherever the cursor is. SPM puts the prefix next to the
    middle: `<|fim_prefix|><|fim_suffix|>` suffix `<|fim_middle|>` prefix middle.
    """
    first, last = sorted(generator.integers(0, len(text) + 1, 2).tolist())
    prefix, middle, suffix = text[:first], text[first:last], text[last:]
    if generator.random() < SPM_SHARE:
        return f"{FIM_PREFIX}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}{prefix}{middle}"
    return f"{infilling_prompt(prefix, suffix)}{middle}"


def infilling_prompt(prefix: str, suffix: str) -> str:
    """Return the prompt, in PSM, that asks for the text between a prefix and a suffix."""
    return f"{FIM_PREFIX}{prefix}{FIM_SUFFIX}{suffix}{FIM_MIDDLE}"


def chunks(text: str) -> Iterator[str]:
    """Yield a text in parts of at most `MAX_CHARACTERS`, cut after line ends where there are any."""
    while len(text) > MAX_CHARACTERS:
        cut = text.rfind("\n", 0, MAX_CHARACTERS) + 1 or MAX_CHARACTERS
        yield text[:cut]
        text = text[cut:]
    yield text
