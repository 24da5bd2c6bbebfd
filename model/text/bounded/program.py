"""The program of `model.text.bounded.processes`: tokenizes within limits of time and memory.

It does not import PyTorch.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from array import array

import msgspec
import tokenizers

from model.device.niceness import give_way
from model.errors import TokenizerError
from model.text.bounded.processes import (
    MEMORY_BYTES,
    READ_SECONDS,
    SECONDS_PER_BYTE,
    SIZE,
    TEXT_SECONDS,
    Answer,
    Source,
    Texts,
)
from model.text.library_errors import library_error
from model.text.tokenizer import Tokenizer, read_offsets


def main() -> None:
    """Tokenize until standard input ends."""
    give_way()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    lines, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer: tokenizers.Tokenizer | None = None
    while head := lines.read(SIZE.size):
        body = lines.read(SIZE.unpack(head)[0])
        try:
            if tokenizer is None:
                _limit_time(READ_SECONDS)
                tokenizer = _read_source(msgspec.msgpack.decode(body, type=Source))
                answer = Answer()
            else:
                task = msgspec.msgpack.decode(body, type=Texts)
                size = sum(len(text.encode()) for text in task.texts)
                _limit_time(TEXT_SECONDS + SECONDS_PER_BYTE * size)
                answer = _encode(tokenizer, task)
        except MemoryError:
            os.abort()
        except TokenizerError as error:
            answer = Answer(error=str(error))
        reply = msgspec.msgpack.encode(answer)
        answers.write(SIZE.pack(len(reply)) + reply)
        answers.flush()


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _limit_time(seconds: float) -> None:
    """End this process when it has used so much more processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + seconds + 1))


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
