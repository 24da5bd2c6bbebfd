"""A process that compiles constraints and checks texts, since some of them crash the library or keep it busy for hours.

`server.http.text.grammar_compiler` starts it as `python -m server.http.text.grammar_worker`. Its input is a
`WorkerConfig`, then one `Task` after the other (`model.helper_process`). A task ends it when it takes too much
processor time, or runs out of stack or memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import traceback
from typing import Final

import msgspec

from model.errors import GrammarError, ModelError
from model.helper_process import child
from model.helper_process.process import TASK_FAILED
from model.sampling.grammar import GrammarTokenizer, compile_constraint
from model.text.tokenizer import Tokenizer
from server.http.text.grammar_compiler import (
    Constraint,
    Findings,
    Task,
    Verdict,
    WorkerConfig,
)

# Smaller than those of the engine's threads, so that what compiles here does not overflow there.
_STACK_BYTES: Final = 1 << 20
_MEMORY_BYTES: Final = 4 << 30
_SPARE_BYTES: Final = 256 << 20
"""Memory that must be there for a task, so that a machine without memory is not taken for a fault of the task."""


def main() -> None:
    """Check constraints until the parent closes the connection."""
    child.limit(_MEMORY_BYTES)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


def _serve() -> None:
    data = child.read_config()
    if data is None:
        return
    config = msgspec.json.decode(data, type=WorkerConfig)
    try:
        text_tokenizer = Tokenizer.from_folder(config.folder)
    except ModelError as error:
        sys.stderr.write(f"a grammar worker cannot load the tokenizer: {error}\n")
        os._exit(os.EX_CONFIG)
    try:
        tokenizer = GrammarTokenizer(text_tokenizer, config.vocab_size, config.eos_token_ids)
    except GrammarError as error:  # for every constraint of this model
        refusal = msgspec.json.encode(Verdict(error=str(error)))
        child.serve(lambda _: refusal)
        return
    mmap.mmap(-1, _SPARE_BYTES).close()
    child.serve(lambda task: msgspec.json.encode(_do(tokenizer, text_tokenizer, task)))


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
