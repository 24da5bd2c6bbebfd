"""A process that compiles constraints and checks texts, since some of them crash the library or keep it busy for hours.

`server.http.text.grammar_compiler` starts it as `python -m server.http.text.grammar_worker`. Its input is a
`WorkerConfig`, then one `Task` after the other, in the frames of `server.http.text.helper_process`. It ends when its
input ends, and a task ends it when it takes too much processor time (by SIGPROF), or runs out of stack or memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from model.device.niceness import give_way
from model.errors import GrammarError, ModelError
from model.sampling.grammar import GrammarTokenizer, compile_constraint
from model.text.tokenizer import Tokenizer
from server.engine.link.engine_process.process_setup import continue_at_end_of_parent
from server.http.text.grammar_compiler import (
    Constraint,
    Findings,
    Task,
    Verdict,
    WorkerConfig,
)
from server.http.text.helper_process import LENGTH, TASK_FAILED, Report

if TYPE_CHECKING:
    from typing import BinaryIO

# Smaller than those of the engine's threads, so that what compiles here does not overflow there.
_STACK_BYTES: Final = 1 << 20
_MEMORY_BYTES: Final = 4 << 30
_OOM_SCORE: Final = "1000"
"""Where memory runs out, the system ends this process before the engine."""
_SPARE_BYTES: Final = 256 << 20
"""Memory that must be there for a task, so that a machine without memory is not taken for a fault of the task."""


def main() -> None:
    """Check constraints until standard input ends."""
    give_way()
    with contextlib.suppress(OSError):  # only Linux has it: memory ends before the limit below
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    continue_at_end_of_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # goes to the whole process group
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


def _limit(kind: int, most: int) -> None:
    """Lower a limit of this process; one that is lower already stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(kind, (most, most))


def _serve(tasks: BinaryIO, reports: BinaryIO) -> None:
    config = msgspec.json.decode(_read(tasks), type=WorkerConfig)
    try:
        text_tokenizer = Tokenizer.from_folder(config.folder)
    except ModelError as error:
        sys.stderr.write(f"a grammar worker cannot load the tokenizer: {error}\n")
        os._exit(os.EX_CONFIG)
    tokenizer: GrammarTokenizer | None = None
    unsupported = ""
    try:
        tokenizer = GrammarTokenizer(text_tokenizer, config.vocab_size, config.eos_token_ids)
    except GrammarError as error:  # for every constraint of this model
        unsupported = str(error)
    mmap.mmap(-1, _SPARE_BYTES).close()
    _report(reports, None)
    while data := _read(tasks):
        answer: Verdict | Findings = Verdict(error=unsupported)
        if tokenizer is not None:
            signal.setitimer(signal.ITIMER_PROF, config.seconds)
            answer = _do(tokenizer, text_tokenizer, data)
            signal.setitimer(signal.ITIMER_PROF, 0)
        _report(reports, answer)


def _do(tokenizer: GrammarTokenizer, text_tokenizer: Tokenizer, data: bytes) -> Verdict | Findings:
    """Do a task; one that makes the program fail ends the process."""
    try:
        task = msgspec.json.decode(data, type=Task)
        if task.texts is None:
            return _compile(tokenizer, text_tokenizer, task.constraint)
        return _find_violations(task.constraint, task.texts)
    except (OSError, ImportError):  # the machine's, not the task's
        traceback.print_exc()
        os._exit(os.EX_OSERR)
    except BaseException:  # noqa: BLE001 - the libraries' own are not derived from Exception
        traceback.print_exc()
        os._exit(TASK_FAILED)


def _read(tasks: BinaryIO) -> bytes:
    """Return the next frame; empty if the input has ended."""
    header = tasks.read(LENGTH.size)
    return tasks.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""


def _report(reports: BinaryIO, answer: Verdict | Findings | None) -> None:
    report = Report(time.process_time(), msgspec.Raw(msgspec.json.encode(answer)))
    data = msgspec.json.encode(report)
    reports.write(LENGTH.pack(len(data)) + data)
    reports.flush()


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
