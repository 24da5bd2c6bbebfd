"""Finds the tokens with which a tokenizer's files say that a sequence ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import tokenizers

from model.text.tokens.files import TokenizerFiles

TOKENIZER: Final = "tokenizer.json"
_EOS: Final = "eos_token"
_WELL_KNOWN: Final = frozenset(
    {
        "</s>", "<|endoftext|>", "<|end_of_text|>", "<|endofseq|>", "<eos>", "<EOS>", "[EOS]", "<|eos|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_turn|>",
        "<|END_OF_TURN_TOKEN|>",
    }
)  # fmt: skip
"""Names that mean nothing but the end of a text or of a turn. `<|end|>` also ends parts of a turn, in gpt-oss."""


def named_ends(library: tokenizers.Tokenizer, files: TokenizerFiles) -> dict[int, tuple[str, ...]]:
    """Return, for each token that ends a sequence, the files that say so.

    Where no file names an end-of-sequence token and tokenizer.json adds none to texts, its special tokens with
    well-known names are the ends.

    Args:
        library: the tokenizer.
        files: of the checkpoint.
    """
    sources: dict[int, tuple[str, ...]] = {}

    def add(text: str, file: str) -> None:
        token_id = library.token_to_id(text)
        if token_id is not None:
            sources[token_id] = (*sources.get(token_id, ()), file)

    for file, text in files.named.get(_EOS, {}).items():
        add(text, file)
    for text in dict.fromkeys(_appended(library)):
        add(text, TOKENIZER)
    if not sources:
        for token_id, token in library.get_added_tokens_decoder().items():
            if token.special and token.content in _WELL_KNOWN:
                sources[token_id] = (TOKENIZER,)
    return sources


def _appended(library: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield the tokens that the post-processor puts behind each text."""
    processor = library.post_processor
    if processor is not None:
        yield from _last_tokens(json.loads(processor.__getstate__()))


def _last_tokens(step: Mapping[str, Any]) -> Iterator[str]:
    match step:
        case {"type": "Sequence", "processors": list(steps)}:
            for it in steps:
                yield from _last_tokens(it)
        case {"type": "TemplateProcessing", "single": list(parts)}:
            for part in reversed(parts):
                match part:
                    case {"SpecialToken": {"id": str(text)}}:
                        yield text
                    case _:
                        return
        case {"type": "RobertaProcessing" | "BertProcessing", "sep": [str(text), _]}:
            yield text
