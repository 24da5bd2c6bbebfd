"""Checks the grammars of receipts in processes with limits, as a service checks those of requests.

An untrusted grammar may crash the library that compiles it, or take hours.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from model.sampling.grammar import SERIALIZED
from server.errors import OverloadedError, UnavailableError
from server.http.text.grammar_compiler import Constraint, GrammarCompiler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from server.cli.replay.work import Task

_AT_ONCE: Final = 2


def without_refused(
    tasks: Sequence[Task], folder: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> list[Task]:
    """Return the tasks that an engine may compute; the others get an error.

    Args:
        tasks: any.
        folder: the checkpoint, with its tokenizer.
        vocab_size: number of the model's logits.
        eos_token_ids: the model's end tokens.
    """
    grammars = dict.fromkeys(it for task in tasks if (it := task.sampling.grammar) is not None)
    if not grammars:
        return [*tasks]
    refusals = asyncio.run(_refusals(grammars, folder, vocab_size, eos_token_ids))
    kept = []
    for task in tasks:
        refusal = refusals.get(task.sampling.grammar or "", "")
        if refusal:
            task.computed.error = f"the grammar cannot be compiled: {refusal}"
        else:
            kept.append(task)
    return kept


async def _refusals(
    grammars: Iterable[str], folder: str, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> dict[str, str]:
    """Return why each grammar is refused; empty for those that are not."""
    compiler = GrammarCompiler(folder, eos_token_ids)
    found: dict[str, str] = {}
    waiting = iter(grammars)

    async def check() -> None:
        for grammar in waiting:
            try:
                verdict = await compiler.check(Constraint(SERIALIZED, grammar), vocab_size)
                found[grammar] = verdict.error
            except (OverloadedError, UnavailableError) as error:
                found[grammar] = str(error)

    try:
        await asyncio.gather(*(check() for _ in range(_AT_ONCE)))
    finally:
        compiler.close()
    return found
