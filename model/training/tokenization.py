"""The bundled model's tokenizer: byte-level BPE whose tokens do not cross Python's line structure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
"""Begins every document, and so also ends the document before it."""

FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX = "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, FIM_PREFIX, FIM_MIDDLE, FIM_SUFFIX, TURN_START, TURN_END)
"""In the order of their ids."""
TURN_END_ID = SPECIAL_TOKENS.index(TURN_END)
ANSWER_START = f"{TURN_START}assistant\n"
CHAT_TEMPLATE = f"""\
{{{{- bos_token }}}}
{{%- for message in messages %}}
    {{{{- '{TURN_START}' + message.role + '\\n' + (message.content or '') + '{TURN_END}\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '{TURN_START}assistant\\n' }}}}
{{%- endif %}}
"""

SPLIT_PATTERN = "|".join(
    (
        r"\n",  # a line end never merges, so that a prompt that ends with one resembles training text
        r"(?<![^\n]) +",  # indentation, whole
        r" ?[\p{L}_][\p{L}\p{N}_]*",  # a name
        r" ?\p{N}{1,3}",
        r" ?[(\[{]",  # an opening bracket never merges with what follows, for the same reason
        r" ?[^\s\p{L}\p{N}_(\[{]+",
        r" +(?=\s)|[^\S\n]+",
    )
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the tokenizer.

    Args:
        texts: training documents.
        vocab_size: number of entries: the 256 bytes, the special tokens and the merges.

    Returns:
        A tokenizer that prepends `END_OF_TEXT` and restores every string.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B",
        special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`.

    Args:
        tokenizer: from `train_tokenizer`.
        folder: an existing folder.
        max_length: the model's context in tokens.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def chat_turn(role: str, content: str) -> str:
    """Return one message as `CHAT_TEMPLATE` renders it."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], dropout: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Encode documents one after the other, each after a separator.

    Args:
        tokenizer: from `train_tokenizer`.
        texts: the documents.
        dropout: share of BPE merges skipped at random; not reproducible from a seed, since the library has its own
            generator. 0 gives the encoding of serving.
            Source: Provilkov et al. 2020, "BPE-Dropout".

    Returns:
        Token ids, uint16 [T], with a separator at the end, and the start of each document, int64 [docs].
    """
    tokenizer.model.dropout = dropout or None
    parts: list[np.ndarray] = []
    starts = np.zeros(len(texts), dtype=np.int64)
    position = 0
    batch = 512
    for first in range(0, len(texts), batch):
        encodings = tokenizer.encode_batch(list(texts[first : first + batch]))
        for index, encoding in enumerate(encodings, start=first):
            starts[index] = position
            parts.append(np.array(encoding.ids, dtype=np.uint16))
            position += len(parts[-1])
    tokenizer.model.dropout = None
    parts.append(np.array([END_OF_TEXT_ID], dtype=np.uint16))
    return np.concatenate(parts), starts
