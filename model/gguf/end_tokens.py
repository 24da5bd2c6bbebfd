"""The tokens that end a generation, as the metadata of a GGUF file name them. Imports no PyTorch."""

from __future__ import annotations

from typing import Final

from model.gguf.source import Source

_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL: Final = 3
_ENDS_OF_TURNS: Final = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eot|>",
        "<|end_of_text|>", "<|return|>", "<|call|>", "<EOT>", "_<EOT>", "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>",
    }
)  # fmt: skip
"""Control tokens that end an answer of an assistant wherever a chat template writes them."""


def end_token_ids(source: Source) -> list[int]:
    """Return the ids that end a generation, each once.

    Most files name only one of them, and not always the one that ends a turn of a conversation; so a control token
    that ends turns by its name ends a generation too if the chat template writes it.

    Raises:
        ModelFolderError: an id is no whole number, or a list is damaged.
    """
    stated = [source.optional_integer(f"tokenizer.ggml.{key}") for key in _KEYS]
    found = [it for it in stated if it is not None]
    template = source.metadata.get("tokenizer.chat_template")
    written = {it for it in _ENDS_OF_TURNS if isinstance(template, str) and it in template}
    if written:
        types = source.array("tokenizer.ggml.token_type")
        tokens = source.array("tokenizer.ggml.tokens") if types else []
        found += [
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == _CONTROL and token in written
        ]
    return list(dict.fromkeys(found))
