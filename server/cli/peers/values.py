"""Other spellings of the values of Tessera's own settings, as peers have them."""

from __future__ import annotations

import re
from typing import Final

SPELLINGS: Final = {
    "dtype": {
        "half": "float16", "fp16": "float16", "f16": "float16", "float": "float32", "fp32": "float32",
        "f32": "float32", "bf16": "bfloat16",
    },
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8"},
    "generation_config": {"vllm": "none"},
    "tool_call_format": {
        "llama3_json": "llama3", "qwen": "hermes", "qwen25": "hermes", "qwen3_coder": "qwen3-coder",
        "qwen3_xml": "qwen3-coder",
    },
    "load_format": {"hf": "auto", "pt": "pickle"},
    "model_backend": {"vllm": "tessera", "sglang": "tessera"},
    "log_level": {"warn": "warning", "critical": "error", "fatal": "error"},
}  # fmt: skip
"""For each setting, its value for that of a peer with the same meaning."""

ADVICE: Final = {
    "quantization": "the format of a checkpoint that is quantized already is found there: leave it out",
    "kv_cache_dtype": "fp8 is e4m3, which fp8_e4m3 names too",
    "tool_call_format": "auto finds it by the chat template",
    "device": "the environment variable CUDA_VISIBLE_DEVICES chooses a GPU",
    "max_model_len": "without it, the limit is that of the model",
}
"""What to say beside the allowed values of a setting."""

is_number: Final = re.compile(r"[0-9]{1,30}").fullmatch
"""Whether a text is a whole number that can be computed with: Python refuses to read thousands of digits."""
_is_scaled: Final = re.compile(r"([0-9]{1,30})(?:\.([0-9]{1,30}))?([kKmMgGtT])").fullmatch
_TRUE: Final = frozenset({"true", "1", "on", "yes", "t", "y", "enabled"})
_FALSE: Final = frozenset({"false", "0", "off", "no", "f", "n", "disabled"})
_SCALED: Final = ("_tokens", "_bytes", "_len", "_seqs", "_requests", "_connections")


def tessera_value(setting: str, text: str) -> str:
    """Return the text of a setting for one that a peer would take; any other text stays as it is."""
    if setting.endswith(_SCALED):
        return scaled_number(text)
    return SPELLINGS.get(setting, {}).get(text.lower(), text)


def scaled_number(text: str) -> str:
    """Write a number with k, m, g or t for powers of 1000, or with K, M, G or T for powers of 1024, in digits.

    As in vLLM: 4k is 4000, 4K is 4096, and 25.6k is 25600. Any other text stays as it is, for the check of the
    setting.
    """
    if (match := _is_scaled(text.strip())) is None:
        return text
    whole, fraction, unit = match[1], match[2] or "", match[3]
    power = "kmgt".index(unit.lower()) + 1
    if unit.isupper():
        return text if fraction else str(int(whole) << 10 * power)
    number = int(whole + fraction) * 1000**power
    return text if number % 10 ** len(fraction) else str(number // 10 ** len(fraction))


def truth(text: str | None) -> bool | None:
    """Return what a text of true or false says; None if it is neither."""
    lower = "true" if text is None else text.strip().lower()
    return True if lower in _TRUE else False if lower in _FALSE else None


def is_flag(word: str) -> bool:
    """Whether a word looks like a flag, and not like a value, as for argparse."""
    return len(word) > 1 and word[0] == "-" and " " not in word and not word[1].isdigit()
