"""Files beside config.json that describe the format of quantized checkpoints, where config.json does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from model.checkpoint.formats import awq, gptq, modelopt
from model.checkpoint.formats.table import CONFIG_KEYS
from model.json_input import read_json_object

SIDE_FILES: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    modelopt.FILE: modelopt.from_file,
    gptq.FILE: gptq.from_file,
    awq.FILE: awq.from_file,
}
"""By its name what makes `quantization_config` of a file's content."""


def with_side_files(folder: Path, config: dict[str, Any], max_bytes: int) -> dict[str, Any]:
    """Return a config.json with `quantization_config`, from the first of `SIDE_FILES` if it has none itself.

    Args:
        folder: the checkpoint.
        config: the content of its config.json.
        max_bytes: limit of a file's size.

    Raises:
        ModelError: the file cannot be read, or does not describe a format.
    """
    if any(config.get(key) is not None for key in CONFIG_KEYS):
        return config
    for name, make in SIDE_FILES.items():
        if (content := read_json_object(folder, name, max_bytes)) is not None:
            return config | {CONFIG_KEYS[0]: make(content)}
    return config
