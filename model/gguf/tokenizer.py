"""What the tokenizer.json and the tokenizer_config.json of a GGUF checkpoint would say. Imports no PyTorch.

llama.cpp has two kinds of BPE. "gpt2" has merges, and texts in GPT-2's spelling of bytes. "llama" is that of
SentencePiece: it has a score for each token instead of merges, and joins the two neighbours whose joined token has the
highest score. That is what the merges do which `_merges_of_scores` lists.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from model.errors import TokenizerError
from model.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from model.gguf.source import MAX_ELEMENTS, Source

MAX_MERGE_CHARACTERS: Final = 100_000_000
"""Of all merges that follow from scores; Gemma's have 20 million."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_ADDED: Final = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_SPACE: Final = "\u2581"
_PREFIX: Final = "tokenizer.ggml"
_TEMPLATE: Final = "tokenizer.chat_template"
_TOKENS_BY_KEY: Final = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id", "sep_token": "seperator_token_id",
}  # fmt: skip
_NO_RSTRIP: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})

_logger = logging.getLogger(__name__)


def to_tokenizer(source: Source) -> dict[str, Any]:
    """Return the content of a tokenizer.json that gives the same tokens as llama.cpp.

    Raises:
        TokenizerError: the tokenizer is of a kind that is not read, or its lists do not fit each other.
        ModelFolderError: the metadata are damaged.
    """
    kind = source.text(f"{_PREFIX}.model", "")
    if kind not in _KINDS:
        shown = f"{_PREFIX}.model = {kind!r:.80}" if kind else f"no {_PREFIX}.model"
        raise TokenizerError(
            f"{source.file} has {shown}, whose tokenizer is not read; read are {', '.join(_KINDS)}"
        )
    tokens = _tokens(source)
    types = source.array(f"{_PREFIX}.token_type") or [_NORMAL] * len(tokens)
    _check_length(source, "token_type", types, len(tokens))
    while tokens and types[len(tokens) - 1] == _UNUSED and tokens[-1].startswith("[PAD"):
        tokens.pop()  # rows of the embedding that no token has
    found = _KINDS[kind](source, tokens, types)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(source, tokens, types, kind),
        "post_processor": _post_processor(source, tokens, found.pop("adds_bos")),
        **found,
    }


def to_tokenizer_config(source: Source) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json: the chat templates, and the tokens that they may name.

    Raises:
        ModelFolderError: the metadata are damaged.
    """
    tokens = source.array(f"{_PREFIX}.tokens")
    config: dict[str, Any] = {}
    for name, key in _TOKENS_BY_KEY.items():
        token_id = source.optional_integer(f"{_PREFIX}.{key}")
        if token_id is not None and token_id < len(tokens):
            config[name] = tokens[token_id]
    named = {
        key.removeprefix(f"{_TEMPLATE}."): text
        for key, text in source.metadata.items()
        if key.startswith(f"{_TEMPLATE}.") and isinstance(text, str)
    }
    if _TEMPLATE in source.metadata:
        named = {"default": source.text(_TEMPLATE), **named}
    if named:
        texts = [{"name": name, "template": text} for name, text in named.items()]
        config["chat_template"] = named["default"] if [*named] == ["default"] else texts
    return config


def _tokens(source: Source) -> list[str]:
    tokens = source.array(f"{_PREFIX}.tokens")
    if not tokens or not isinstance(tokens[0], str):
        raise TokenizerError(f"{source.file}: {_PREFIX}.tokens must be a list of texts")
    return tokens


def _check_length(source: Source, name: str, found: Sequence[object], wanted: int) -> None:
    if len(found) != wanted:
        raise TokenizerError(
            f"{source.file}: {_PREFIX}.{name} must have {wanted} elements, as {_PREFIX}.tokens, found {len(found)}"
        )


def _vocabulary(source: Source, tokens: Sequence[str]) -> dict[str, int]:
    """Return the ids by token. Of tokens with the same text only the first can be in a text."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    if twice := len(tokens) - len(vocabulary):
        _logger.warning("%s has %d tokens twice; the first of each is used", source.file, twice)
    return vocabulary


def _byte_level(source: Source, tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    del types
    pre = _pre_tokenizer(source)
    merges = source.array(f"{_PREFIX}.merges")
    pairs = []
    for merge in merges:
        # A space of a text is no space in GPT-2's spelling, but some merges of other files begin with one.
        place = merge.find(" ", 1) if isinstance(merge, str) else -1
        if place < 0:
            raise TokenizerError(
                f"{source.file}: {_PREFIX}.merges must be pairs of tokens with a space between, found {merge!r:.80}"
            )
        pairs.append((merge[:place], merge[place + 1 :]))
    vocabulary = _vocabulary(source, tokens)
    for first, second in pairs:
        if first not in vocabulary or second not in vocabulary or first + second not in vocabulary:
            raise TokenizerError(
                f"{source.file}: the merge {f'{first} {second}'!r:.80} has or makes a token that is not in"
                f" {_PREFIX}.tokens"
            )
    return {
        "adds_bos": pre.adds_bos,
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": pre.steps(),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": _bpe(vocabulary, pairs, ignore_merges=pre.ignore_merges),
    }


def _pre_tokenizer(source: Source) -> PreTokenizer:
    name = source.text(f"{_PREFIX}.pre", "default")
    if name == "default":
        # Older files lack the key; what llama.cpp does then is right for no tokenizer.
        default = {"qwen2": "qwen2", "qwen3": "qwen2", "llama": "llama-bpe"}.get(
            source.architecture, "gpt-2"
        )
        _logger.warning(
            "%s does not say how its tokenizer divides texts into words (%s.pre); as %s is assumed, so some texts may"
            " have other tokens",
            source.file,
            _PREFIX,
            default,
        )
        name = default
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{source.file}: {_PREFIX}.pre = {name!r:.80} is not supported; supported are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def _sentence_piece(source: Source, tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    scores = source.array(f"{_PREFIX}.scores")
    _check_length(source, "scores", scores, len(types))
    if not all(isinstance(it, int | float) and math.isfinite(it) for it in scores):
        raise TokenizerError(f"{source.file}: {_PREFIX}.scores must be numbers, all finite")
    if source.architecture.startswith("gemma"):
        # Their scores do not follow the order of the merges, as those of other files do; the ids do.
        scores = [-float(i) for i in range(len(types))]
    vocabulary = _vocabulary(source, tokens)
    has_prefix = source.flag(f"{_PREFIX}.add_space_prefix", default=True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] * has_prefix
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = source.optional_integer(f"{_PREFIX}.unknown_token_id")
    unknown = 0 if unknown is None else unknown
    merges = _merges_of_scores(source, vocabulary, scores, types)
    model = _bpe(vocabulary, merges, ignore_merges=False)
    has_bytes = any(kind == _BYTE for kind in types)
    return {
        "adds_bos": True,
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model
        | {
            "unk_token": tokens[unknown] if unknown < len(tokens) else None,
            "fuse_unk": True,
            "byte_fallback": has_bytes,
        },
    }


def _merges_of_scores(
    source: Source, vocabulary: dict[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that join to a token, those first whose token has the highest score.

    Raises:
        TokenizerError: they are too many.
    """
    found: list[tuple[float, int, int, str, str]] = []
    characters = 0
    for token, token_id in vocabulary.items():
        if types[token_id] not in (_NORMAL, _USER_DEFINED):
            continue
        for first, second in _halves(token, vocabulary):
            found.append((-scores[token_id], vocabulary[first], vocabulary[second], first, second))
            characters += len(token)
        if characters > MAX_MERGE_CHARACTERS or len(found) > MAX_ELEMENTS:
            raise TokenizerError(
                f"{source.file}: tokens join to other tokens in more than {MAX_ELEMENTS} ways of together"
                f" {MAX_MERGE_CHARACTERS} characters, the most that are supported"
            )
    found.sort(key=lambda it: it[:3])
    return [(first, second) for *_, first, second in found]


def _halves(token: str, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    for place in range(1, len(token)):
        first = token[:place]
        if first in vocabulary and token[place:] in vocabulary:
            yield first, token[place:]


def _bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool
) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
        "vocab": vocabulary, "merges": merges,
    }  # fmt: skip


def _added_tokens(
    source: Source, tokens: Sequence[str], types: Sequence[int], kind: str
) -> list[dict[str, Any]]:
    # Of Phi-3, whose tokenizer takes the space after a special token as a part of it; files do not say so.
    strips = kind == "llama" and source.metadata.get("general.architecture") == "phi3"
    added = []
    seen: set[str] = set()
    for token_id, (token, its) in enumerate(zip(tokens, types, strict=False)):
        if its in _ADDED and token and token not in seen:
            seen.add(token)
            special = its != _USER_DEFINED
            added.append(
                {
                    "id": token_id, "content": token, "single_word": False, "lstrip": False,
                    "rstrip": strips and special and token not in _NO_RSTRIP, "normalized": False, "special": special,
                }
            )  # fmt: skip
    return added


def _post_processor(source: Source, tokens: Sequence[str], adds_bos: bool) -> dict[str, Any] | None:
    """Return what adds BOS and EOS to a text; None if nothing does."""
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for name, default, place in (("bos", adds_bos, 0), ("eos", False, 2)):
        if not source.flag(f"{_PREFIX}.add_{name}_token", default=default):
            continue
        token_id = source.optional_integer(f"{_PREFIX}.{name}_token_id")
        if token_id is None and name == "bos" and f"{_PREFIX}.add_bos_token" not in source.metadata:
            continue
        if token_id is None or token_id >= len(tokens):
            raise TokenizerError(
                f"{source.file}: {_PREFIX}.{name}_token_id = {token_id} is none of the {len(tokens)} tokens, and is"
                " added to every text"
            )
        token = tokens[token_id]
        special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
        parts.insert(place, {"SpecialToken": {"id": token, "type_id": 0}})
    if not special:
        return None
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": special}


_KINDS: Final = {"gpt2": _byte_level, "llama": _sentence_piece}
"""By the values of `tokenizer.ggml.model`."""
