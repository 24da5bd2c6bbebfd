"""Reads a checkpoint's default sampling parameters from its generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

from model.errors import ModelError
from model.hub.installed_models import recommended_sampling
from model.json_input import convert, read_json_object
from model.sampling.parameters import SamplingDefaults

FILE: Final = "generation_config.json"
MAX_FILE_BYTES: Final = 4 * 2**20

_HARMLESS: Final = frozenset(
    {
        "_from_model_config", "assistant_confidence_threshold", "bos_token_id", "cache_config", "cache_implementation",
        "decoder_start_token_id", "eos_token_id", "is_assistant", "max_length", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
        "pad_token_id", "return_dict_in_generate", "return_legacy_cache", "token_healing", "transformers_version",
        "use_cache",
    }
)  # fmt: skip
"""Keys that do not change which token is sampled. `max_length` is 20 in all files that do not set it."""
_OFF: Final = {
    "num_beams": 1, "num_return_sequences": 1, "length_penalty": 1, "encoder_repetition_penalty": 1,
    "diversity_penalty": 0, "num_beam_groups": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0, "eta_cutoff": 0, "min_length": 0,
}  # fmt: skip
"""Values of further keys that switch them off; false and null do so for every key."""

_logger = logging.getLogger(__name__)


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Read the defaults of a checkpoint; if it has none, those that an installed model has, or the service's own.

    The request alone decides whether it samples, so `do_sample` of the file is not among them. Logs the keys that
    change what `transformers` would generate and are not applied.

    Raises:
        ModelFolderError: the file is broken, or a value is of the wrong type or outside its limits.
    """
    file = folder / FILE
    content = read_json_object(folder, FILE, MAX_FILE_BYTES) or recommended_sampling(folder)
    try:
        defaults = convert(content, SamplingDefaults)
    except ModelError as error:
        raise type(error)(f"{file}: {error}; --generation-config none ignores the file") from None
    if left := _not_applied(content):
        _logger.warning("%s: %s have no effect here", file, ", ".join(left))
    return defaults


def _not_applied(content: dict[str, Any]) -> list[str]:
    applied = {*SamplingDefaults.__struct_fields__, *_HARMLESS, "do_sample"}
    return sorted(
        f"{key} = {value!r:.40}"
        for key, value in content.items()
        if key not in applied and value not in (None, False) and value != _OFF.get(key)
    )
