"""Reads the prompts of a completion request, as text or as token ids, and builds fill-in-the-middle prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from server.errors import ValidationError
from server.http.body.validation import describe

if TYPE_CHECKING:
    from model.text.tokenizer import Tokenizer
    from server.http.context import AppContext

PromptInput: TypeAlias = str | list[int]


class FillInTheMiddle(NamedTuple):
    """Names of the tokens with which a family of models marks the parts of a text.

    Attributes:
        prefix: comes before the text before the gap.
        suffix: comes before the text after the gap.
        middle: comes before the text in the gap, which the model writes.
        suffix_first: whether the text after the gap comes first.
        ends: further tokens with which these models end the text in the gap.
    """

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False
    ends: tuple[str, ...] = ()


FAMILIES = (
    # Qwen2.5-Coder, CodeGemma
    FillInTheMiddle(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, Granite, SmolLM
    FillInTheMiddle(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<file_sep>", "<fim_pad>")
    ),
    FillInTheMiddle("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInTheMiddle("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # CodeLlama
    FillInTheMiddle("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    # DeepSeek-Coder: the hole is where the text goes, and the last token follows both parts.
    FillInTheMiddle("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - the model's own characters
    FillInTheMiddle("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)
"""All families; the first whose tokens the tokenizer has is used."""


def count_prompts(value: object) -> int:
    """Return how many prompts the field `prompt` has, if it has one of its forms."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return len(value)
    return 1


def read_prompts(value: object) -> list[PromptInput]:
    """Check the field `prompt`.

    Returns:
        The prompts, as texts or as token ids; at least one, none of them empty.

    Raises:
        ValidationError: the value is none of the four forms.
    """
    prompts: list[PromptInput]
    if isinstance(value, str):
        prompts = [value]
    elif isinstance(value, list) and value:
        prompts = _read_list(value)
    else:
        given = "an empty list" if value == [] else describe(value)
        raise ValidationError(
            f"`prompt` must be a string, or a list of strings or token ids. Given: {given}"
        )
    for prompt in prompts:
        if not prompt:
            raise ValidationError("`prompt` cannot be empty")
        if isinstance(prompt, list) and min(prompt) < 0:
            raise ValidationError(f"`prompt` has token ids < 0. Given: {describe(min(prompt))}")
    return prompts


async def encode_prompts(
    prompts: list[PromptInput], context: AppContext, *, add_special_tokens: bool, most: int | None
) -> list[list[int]]:
    """Tokenize the prompts that are texts.

    Args:
        prompts: from `read_prompts`.
        context: the application's context.
        add_special_tokens: whether to add the tokens that the tokenizer adds to every text, such as BOS.
        most: limit of a prompt's tokens, as for `AppContext.encode`.

    Raises:
        ValidationError: a prompt cannot be tokenized, or has no tokens.
    """
    return [
        await context.encode(prompt, "prompt", add_special_tokens=add_special_tokens, most=most)
        if isinstance(prompt, str)
        else prompt
        for prompt in prompts
    ]


def find_family(tokenizer: Tokenizer) -> FillInTheMiddle | None:
    """Return the first family whose tokens a tokenizer has; None if it has none's."""
    return next((family for family in FAMILIES if all(_ids(tokenizer, _marks(family)))), None)


def require_family(tokenizer: Tokenizer) -> FillInTheMiddle:
    """Return the family of a tokenizer's model.

    Raises:
        ValidationError: the tokenizer has no tokens for it.
    """
    family = find_family(tokenizer)
    if family is None:
        known = "; ".join(" ".join(_marks(family)) for family in FAMILIES)
        raise ValidationError(
            f"`suffix` needs a model with tokens for filling in the middle, one of: {known}"
        )
    return family


def end_token_ids(family: FillInTheMiddle, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids of the tokens that end the text in the gap."""
    return tuple(i for i in _ids(tokenizer, family.ends) if i is not None)


async def encode_gap(
    family: FillInTheMiddle, prompt: str, suffix: str, context: AppContext, *, most: int | None
) -> list[int]:
    """Tokenize the texts before and after a gap for a model that fills it.

    Args:
        family: of the model.
        prompt: the text before the gap.
        suffix: the text after it.
        context: the application's context.
        most: limit of the tokens of each text, as for `AppContext.encode`.

    Raises:
        ValidationError: a text cannot be tokenized.
    """
    tokenizer = context.tokenizer
    before = await context.encode(prompt, "prompt", add_special_tokens=False, most=most)
    after = await context.encode(suffix, "suffix", add_special_tokens=False, most=most)
    prefix_mark, suffix_mark, *middle_mark = (
        i for i in _ids(tokenizer, _marks(family)) if i is not None
    )
    parts = [[prefix_mark, *before], [suffix_mark, *after]]
    if family.suffix_first:
        parts.reverse()
    return [*_start(tokenizer), *parts[0], *parts[1], *middle_mark]


def _marks(family: FillInTheMiddle) -> tuple[str, ...]:
    marks = (family.prefix, family.suffix, family.middle)
    return tuple(mark for mark in marks if mark is not None)


def _ids(tokenizer: Tokenizer, names: tuple[str, ...]) -> list[int | None]:
    return [tokenizer.token_id(name) for name in names]


def _start(tokenizer: Tokenizer) -> list[int]:
    """Return the BOS token if the tokenizer begins every text with it."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []


def _read_list(value: list[object]) -> list[PromptInput]:
    first = value[0]
    try:
        if isinstance(first, int):
            return [msgspec.convert(value, list[int])]
        return list(
            msgspec.convert(value, list[str] if isinstance(first, str) else list[list[int]])
        )
    except msgspec.ValidationError:
        raise ValidationError(
            "`prompt` must be a string, or a list of strings, of token ids or of lists of token ids"
        ) from None
