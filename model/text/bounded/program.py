"""The program of `model.text.bounded.processes`, a helper process: tokenizes within limits of time and memory.

It does not import PyTorch.
"""

from __future__ import annotations

import os
from array import array

import msgspec
import tokenizers

from model.errors import TokenizerError
from model.helper_process import child
from model.text.bounded.processes import (
    MEMORY_BYTES,
    Answer,
    Source,
    Texts,
)
from model.text.library_errors import library_error
from model.text.tokenizer import Tokenizer, read_offsets


class _Program:
    """Owns the tokenizer, which the first task names."""

    def __init__(self) -> None:
        self._tokenizer: tokenizers.Tokenizer | None = None

    def answer(self, task: bytes) -> bytes:
        """Do a task and return the encoded `Answer`."""
        try:
            if self._tokenizer is None:
                self._tokenizer = _read_source(msgspec.msgpack.decode(task, type=Source))
                answer = Answer()
            else:
                answer = _encode(self._tokenizer, msgspec.msgpack.decode(task, type=Texts))
        except MemoryError:
            os.abort()
        except TokenizerError as error:
            answer = Answer(error=str(error))
        return msgspec.msgpack.encode(answer)


def main() -> None:
    """Tokenize until the parent closes the connection."""
    child.limit(MEMORY_BYTES)
    child.read_config()
    child.serve(_Program().answer)


def _read_source(source: Source) -> tokenizers.Tokenizer:
    if source.folder:
        return Tokenizer.from_folder(source.folder, in_process=True).library
    return tokenizers.Tokenizer.from_str(source.content)


def _encode(tokenizer: tokenizers.Tokenizer, task: Texts) -> Answer:
    encode = tokenizer.encode_batch if task.offsets else tokenizer.encode_batch_fast
    try:
        found = encode(task.texts, add_special_tokens=task.add_special_tokens)
    except BaseException as error:
        raise library_error(error, "the tokenizer cannot encode this text") from error
    encodings = []
    for encoding in found:
        starts, stops = read_offsets(encoding) if task.offsets else (array("I"), array("I"))
        ids = array("I", encoding.ids)
        encodings.append((ids.tobytes(), starts.tobytes(), stops.tobytes()))
    return Answer(encodings)


if __name__ == "__main__":
    main()
