"""How texts are divided into words before a byte-level BPE, by `tokenizer.ggml.pre`. Data only.

GGUF files name the pre-tokenizer of the tokenizer.json that they were made from; the patterns are those of the
tokenizer.json files.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    rf"|{_REST_WITH_SLASH}"
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")


class PreTokenizer(NamedTuple):
    """A pre-tokenizer of a byte-level BPE.

    Attributes:
        patterns: each divides the parts that those before it leave; what matches is a word, and so is what is between.
        gpt2: whether the pattern of GPT-2 follows.
        digits: whether each digit is a word first.
        nfc: whether texts are normalized to Unicode's form C before.
        ignore_merges: whether a word that is a token becomes that token, whatever the merges say.
        adds_bos: whether a text begins with BOS where a file does not say.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def steps(self) -> dict[str, Any]:
        """Return the value of `pre_tokenizer` in tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        for pattern in self.patterns:
            split = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            steps.append({"type": "Split", **split})
        steps.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": self.gpt2,
            }
        )
        return {"type": "Sequence", "pretokenizers": steps}


_LLAMA3_ROW: Final = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN2_ROW: Final = PreTokenizer((_QWEN2,), nfc=True)
_DIGITS_ROW: Final = PreTokenizer(digits=True, gpt2=True)
_GPT2_ROW: Final = PreTokenizer(gpt2=True)
_GPT4O_ROW: Final = PreTokenizer((_GPT4O,))
PRE_TOKENIZERS: Final = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0",
                     "lfm2"), _LLAMA3_ROW),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _QWEN2_ROW),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_ROW),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "exaone4", "mellum", "gigachat"), _GPT2_ROW),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2"), PreTokenizer((_QWEN2,))),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O_ROW),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
}  # fmt: skip
"""By the values of `tokenizer.ggml.pre`."""
