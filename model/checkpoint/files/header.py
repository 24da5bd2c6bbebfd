"""Reads which dtype the weights of a checkpoint have, without PyTorch."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec

from model.errors import WeightsError
from model.files import open_file

_NAMES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LENGTH_BYTES: Final = 8
_MAX_BYTES: Final = 16 << 20


def stored_dtype(folder: Path) -> str | None:
    """Return the dtype of most of the floats in the first safetensors file of a folder; None if it has none.

    What is wrong with the file is said when its tensors are read.
    """
    file = next(iter(sorted(folder.glob("model*.safetensors"))), None)
    if file is None:
        return None
    with contextlib.suppress(
        WeightsError, OSError, ValueError, RecursionError, msgspec.MsgspecError
    ):
        with open_file(folder, file.name, WeightsError) as descriptor:
            length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
            text = os.pread(descriptor, min(length, _MAX_BYTES), _LENGTH_BYTES)
        sizes: Counter[str] = Counter()
        for entry in msgspec.json.decode(text, type=dict[str, dict[str, Any]]).values():
            match entry:
                case {"dtype": str(dtype), "data_offsets": [int(first), int(last)]}:
                    sizes[dtype] += last - first
        floats = {name: size for name, size in sizes.items() if name in _NAMES}
        if floats:
            return _NAMES[max(floats, key=floats.__getitem__)]
    return None
