"""A process that compiles constraints and checks texts, since some of them crash the library or keep it busy for hours.

`server.http.text.grammar_compiler` starts it as `python -m server.http.text.grammar_worker`. Each line of its standard
input is a JSON value: first a `WorkerConfig`, then one `Task` after the other. It answers each with one line, and ends
when its input ends, when a task takes too long (by SIGALRM), or when it runs out of stack or memory.
"""

from __future__ import annotations

import resource
import signal
import sys
import threading
from typing import Final

import msgspec

from model.errors import ModelError
from model.sampling.grammar import GrammarTokenizer, compile_constraint
from model.text.tokenizer import Tokenizer
from server.engine.link.engine_process.process_setup import continue_at_end_of_parent
from server.http.text.grammar_compiler import (
    SECONDS,
    Constraint,
    Findings,
    Task,
    Verdict,
    WorkerConfig,
)

# Smaller than those of the engine's threads, so that what compiles here does not overflow there.
_STACK_BYTES: Final = 1 << 20
_MEMORY_BYTES: Final = 4 << 30


def main() -> None:
    """Check constraints until standard input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    continue_at_end_of_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # goes to the whole process group
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    lines, replies = sys.stdin.buffer, sys.stdout.buffer
    config = msgspec.json.decode(lines.readline(), type=WorkerConfig)
    failure, tokenizer, text_tokenizer = "", None, None
    try:
        text_tokenizer = Tokenizer.from_folder(config.folder)
        tokenizer = GrammarTokenizer(text_tokenizer, config.vocab_size, config.eos_token_ids)
    except ModelError as error:
        failure = str(error)
    while line := lines.readline():
        answer: Verdict | Findings = Verdict(error=failure)
        if tokenizer is not None:
            assert text_tokenizer is not None
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            task = msgspec.json.decode(line, type=Task)
            if task.texts is None:
                answer = _compile(tokenizer, text_tokenizer, task.constraint)
            else:
                answer = _find_violations(task.constraint, task.texts)
            signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(msgspec.json.encode(answer) + b"\n")
        replies.flush()


def _compile(
    tokenizer: GrammarTokenizer, text_tokenizer: Tokenizer, constraint: Constraint
) -> Verdict:
    try:
        found = compile_constraint(
            tokenizer,
            constraint.kind,
            constraint.value,
            strict=constraint.strict,
            text_tokenizer=text_tokenizer,
        )
    except ModelError as error:
        return Verdict(error=str(error))
    return Verdict(grammar=found.grammar, unenforced=found.unenforced)


def _find_violations(constraint: Constraint, texts: tuple[str, ...]) -> Findings:
    from model.text.outputs import (  # noqa: PLC0415 - its library is needed rarely
        UncheckedError,
        violations,
    )

    found: dict[str, None] = {}
    try:
        for text in texts:
            found.update(dict.fromkeys(violations(constraint.kind, constraint.value, text)))
    except UncheckedError:
        return Findings(checked=False)
    return Findings(tuple(found))


if __name__ == "__main__":
    main()
