"""`tessera replay`: reads receipts, has their outputs computed again, and reports what differs."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from model.checkpoint_digest import checkpoint_digest
from model.device.quantizations import QUANTIZATIONS
from model.errors import ModelError
from model.progress import Progress
from server.cli.output import fail, printable, write_result
from server.cli.replay.reading import read_files
from server.cli.replay.work import tasks_of
from server.engine.core.start_checks import StartupError
from server.receipts.conditions import conditions_of, differences
from server.receipts.record import ReceiptError, alterations

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from server.cli.replay.reading import NamedReceipt
    from server.cli.replay.work import Task
    from server.cli.settings import Settings
    from server.engine.core.messages import EngineConfig, EngineInfo
    from server.receipts.record import Conditions, Receipt

COMMAND: Final = "replay"
_FULL: Final = "none"
_FP8: Final = "fp8"
_DTYPES: Final = ("float32", "bfloat16", "float16")


def replay_here(
    options: argparse.Namespace, settings: Settings, prepare: Callable[[Settings], EngineConfig]
) -> None:
    """Compute receipts again with engines in this process: one for each model and format that they are of.

    Exits with status 1 if an output differs, a receipt was altered or an engine cannot start, with 2 if a file has no
    receipt.

    Args:
        options: the parsed flags.
        settings: of the engines; a receipt's conditions replace those that the operator did not give.
        prepare: prepares this process for an engine.
    """
    report = _Report(options)
    groups: dict[Any, list[Task]] = {}
    for task in report.tasks:
        changes = _changes(task.receipt.conditions, settings.model_fields_set)
        groups.setdefault(tuple(changes.items()), []).append(task)
    for changes, tasks in groups.items():
        group = settings.model_copy(update=dict(changes))
        _compute(group, prepare(group), tasks, report)
    report.finish()


class _Report:
    """Reads the receipts, and prints what was found in their order."""

    def __init__(self, options: argparse.Namespace) -> None:
        try:
            self._receipts = read_files(options.files, self.note)
        except ReceiptError as error:
            fail(printable(str(error)), COMMAND, status=2)
        self._quiet: bool = options.quiet
        self._tasks = {id(it): tasks_of(it.name, it.receipt) for it in self._receipts}
        unsure = sum(not it.receipt.deterministic for it in self._receipts)
        if unsure:
            self.note(
                f"{_count(unsure, 'receipt')} of requests that were not deterministic, so that a difference proves "
                "nothing"
            )

    @property
    def tasks(self) -> list[Task]:
        """All outputs."""
        return [task for tasks in self._tasks.values() for task in tasks]

    def note(self, text: str) -> None:
        """Say something about the computation on standard error."""
        print(f"tessera {COMMAND}: {printable(text)}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Print a line for each output and a last one; exits with status 1 if not all are equal."""
        lines, differ, altered = [], 0, 0
        for named in self._receipts:
            changed = alterations(named.receipt)
            altered += bool(changed)
            lines += [f"{named.name}: altered: {it}" for it in changed]
            for task in self._tasks[id(named)]:
                found = task.difference
                differ += found is not None
                if found is not None or not self._quiet:
                    equal = f"equal, {_count(len(task.output.token_ids), 'token')}"
                    lines.append(f"{task.name}: {found or equal}")
        lines.append(_summary(self._receipts, len(self.tasks), differ, altered))
        write_result("\n".join(map(printable, lines)))
        if differ or altered:
            raise SystemExit(1)


def _summary(receipts: Sequence[NamedReceipt], outputs: int, differ: int, altered: int) -> str:
    text = f"{_count(len(receipts), 'receipt')}, {_count(outputs, 'output')}: "
    parts = [f"{differ} differ" if differ else "all equal"]
    if altered:
        parts.append(f"{_count(altered, 'receipt')} altered")
    return text + ", ".join(parts)


def _compute(
    settings: Settings, config: EngineConfig, tasks: Sequence[Task], report: _Report
) -> None:
    """Compute the outputs of one group with an engine."""
    weights = None
    if settings.load_format != "dummy":
        try:
            weights = checkpoint_digest(Path(config.model_path))
        except ModelError as error:
            fail(str(error), COMMAND)
    from server.cli.replay.local import LocalReplay  # noqa: PLC0415 - imports PyTorch

    try:
        engine = LocalReplay(config)
    except StartupError as error:
        fail(str(error), COMMAND)
    try:
        _note_conditions(tasks, engine.info, weights, report.note)
        done = 0
        with Progress("computing again", report.note, len(tasks), "outputs") as progress:

            def count() -> None:
                nonlocal done
                done += 1
                progress.update(done)

            engine.run(tasks, count)
    finally:
        engine.close()


def _changes(conditions: Conditions, given: set[str]) -> dict[str, str]:
    """Return the settings of an engine that computes as a receipt says, without those that the operator gave.

    Formats that a checkpoint has itself need no setting. The C library for CPUs determines the dtype and the cache.
    """
    full = conditions.quantization == _FULL
    wanted = {"model": conditions.model}
    if full or conditions.quantization in QUANTIZATIONS:
        wanted["quantization"] = conditions.quantization
    if full and conditions.dtype in _DTYPES:
        wanted["dtype"] = conditions.dtype
    if _FP8 in conditions.kv_cache_dtype or "float8" in conditions.kv_cache_dtype:
        wanted["kv_cache_dtype"] = _FP8
    return {name: value for name, value in wanted.items() if name not in given}


def _note_conditions(
    tasks: Sequence[Task], info: EngineInfo, weights: str | None, note: Callable[[str], None]
) -> None:
    """Say in which conditions the receipts of a group differ from those of this engine, before it computes."""
    now = conditions_of(info, weights)
    receipts: dict[int, Receipt] = {id(task.receipt): task.receipt for task in tasks}
    found = Counter(
        "; ".join(differences(receipt.conditions, now)) for receipt in receipts.values()
    )
    for text, number in found.items():
        if text:
            note(f"{_count(number, 'receipt')} of other conditions: {text}")
    if info.plan.deterministic.requests == "none" and any(
        it.deterministic for it in receipts.values()
    ):
        note(f"no kernel here computes a request deterministically: {info.plan.deterministic.why}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
