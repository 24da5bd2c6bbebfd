"""A process that checks constraints, since some of them crash the library or keep it busy for hours.

`server.http.text.grammar_compiler` starts it as `python -m server.http.text.grammar_worker`. Each line of its standard
input is a JSON value: first a `WorkerConfig`, then one constraint after the other. It answers each constraint with one
line, and ends when its input ends, when a constraint takes too long (by SIGALRM), or when it runs out of stack or
memory.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from typing import Final

import msgspec

from model.errors import ModelError
from model.sampling.grammar import GrammarTokenizer, check, serialize
from model.text.tokenizer import Tokenizer
from server.http.text.grammar_compiler import SECONDS, Constraint, Verdict, WorkerConfig

# Smaller than those of the engine's threads, so that what compiles here does not overflow there.
_STACK_BYTES: Final = 1 << 20
_MEMORY_BYTES: Final = 4 << 30


def main() -> None:
    """Check constraints until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # goes to the whole process group
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    lines, replies = sys.stdin.buffer, sys.stdout.buffer
    config = msgspec.json.decode(lines.readline(), type=WorkerConfig)
    failure, tokenizer = "", None
    try:
        tokenizer = GrammarTokenizer(
            Tokenizer.from_folder(config.folder), config.vocab_size, config.eos_token_ids
        )
    except ModelError as error:
        failure = str(error)
    while line := lines.readline():
        verdict = Verdict(error=failure)
        if tokenizer is not None:
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            verdict = _check(tokenizer, msgspec.json.decode(line, type=Constraint))
            signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(msgspec.json.encode(verdict) + b"\n")
        replies.flush()


def _check(tokenizer: GrammarTokenizer, constraint: Constraint) -> Verdict:
    try:
        grammar = serialize(constraint.kind, constraint.value)
        check(tokenizer, grammar)
    except ModelError as error:
        return Verdict(error=str(error))
    return Verdict(grammar=grammar)


if __name__ == "__main__":
    main()
