"""`tessera replay`: reads receipts, has their outputs computed again, and reports what differs."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from model.checkpoint.config import ModelConfig
from model.checkpoint_digest import checkpoint_digest
from model.device.quantizations import QUANTIZATIONS
from model.errors import ModelError, ModelFolderError
from model.hub.cache import commit_of
from model.hub.names import BUNDLED
from model.progress import Progress
from server.cli.client.http_client import RequestError
from server.cli.output import fail, printable, write_result
from server.cli.parsing.setting_flags import MODEL
from server.cli.replay.grammars import without_refused
from server.cli.replay.reading import read_files
from server.cli.replay.remote import replay
from server.cli.replay.source import model_settings
from server.cli.replay.work import tasks_of, with_adapters
from server.engine.core.start_checks import StartupError
from server.http.adapters.loaded import AdapterBase, read_modules
from server.receipts.conditions import conditions_of, differences
from server.receipts.record import ReceiptError, alterations

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Sequence

    from server.cli.client.http_client import Target
    from server.cli.replay.work import Task
    from server.cli.settings import Settings
    from server.engine.core.messages import EngineConfig
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
    # All models are found before the first output is computed.
    for group, tasks in [
        (_group(settings, dict(changes), options, report), tasks)
        for changes, tasks in groups.items()
    ]:
        _compute(group, prepare(group), tasks, report)
    report.finish()


def _group(
    settings: Settings, changes: dict[str, str | None], options: argparse.Namespace, report: _Report
) -> Settings:
    """Return the settings of the engine of receipts with some conditions; exits with status 1 without their model."""
    if "model" in changes:
        model = str(changes.pop("model"))
        revision = settings.revision or changes.pop("revision", None)
        try:
            found = model_settings(model, revision, may_download=options.allow_download)
        except ModelFolderError as error:
            fail(printable(str(error)), COMMAND)
        if found["model"] != BUNDLED:
            at = f" at revision {named}" if (named := found.get("revision")) else ""
            report.note(
                f"the receipts name the model {model}; it is read from {found['model']}{at}"
            )
        changes |= found
    return settings.model_copy(update=changes)


def replay_there(options: argparse.Namespace, target: Target, unused: Iterable[str]) -> None:
    """Compute receipts again with a running service; exits as `replay_here`.

    Args:
        options: the parsed flags.
        target: the service.
        unused: flags of settings that were given, which have no effect.
    """
    report = _Report(options)
    if names := ", ".join(sorted(unused)):
        report.note(f"without effect, since the service has its own settings: {names}")
    problem, done = "", 0
    with Progress("computing again", report.note, len(report.tasks), "outputs") as progress:

        def count() -> None:
            nonlocal done
            done += 1
            progress.update(done)

        def compare(now: Conditions, why: str) -> None:
            _note_conditions(report.tasks, now, why, report.note)

        try:
            replay(target, report.tasks, compare, count)
        except* RequestError as errors:
            problem = str(errors.exceptions[0])
    if problem:
        fail(printable(problem), COMMAND)
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
                f"{_count(unsure, 'receipt')} not deterministic: a difference there proves nothing"
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
        lines, differ, failed, altered = [], 0, 0, 0
        for named in self._receipts:
            changed = alterations(named.receipt)
            altered += bool(changed)
            lines += [f"{named.name}: altered: {it}" for it in changed]
            for task in self._tasks[id(named)]:
                found = task.difference
                failed += task.computed.error is not None
                differ += found is not None and task.computed.error is None
                if found is not None or not self._quiet:
                    equal = f"equal, {_count(len(task.output.token_ids), 'token')}"
                    lines.append(f"{task.name}: {found or equal}")
        lines.append(_summary(len(self._receipts), len(self.tasks), differ, failed, altered))
        write_result("\n".join(map(printable, lines)))
        if differ or failed or altered:
            raise SystemExit(1)


def _summary(receipts: int, outputs: int, differ: int, failed: int, altered: int) -> str:
    parts = [f"{differ} differ"] * bool(differ) + [f"{failed} cannot be computed"] * bool(failed)
    if altered:
        parts = [*(parts or ["all equal"]), f"{_count(altered, 'receipt')} altered"]
    return f"{_count(receipts, 'receipt')}, {_count(outputs, 'output')}: {', '.join(parts) or 'all equal'}"


def _compute(
    settings: Settings, config: EngineConfig, tasks: Sequence[Task], report: _Report
) -> None:
    """Compute the outputs of one group with an engine."""
    base = AdapterBase(config.model_path, settings.model_backend, settings.max_lora_rank)
    try:
        adapters = read_modules(base, settings.lora_modules) if config.max_loras else ()
    except ModelError as error:
        fail(printable(str(error)), COMMAND)
    tasks = with_adapters(tasks, {it.ref.digest: it.ref for it in adapters})
    if not tasks:
        return
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
        plan = engine.info.plan.deterministic
        why = plan.why if plan.requests == "none" else ""
        now = conditions_of(engine.info, weights, commit_of(Path(config.model_path)))
        _note_conditions(tasks, now, why, report.note)
        model = ModelConfig.from_folder(Path(config.model_path), settings.model_backend)
        tasks = without_refused(
            tasks, config.model_path, engine.info.vocab_size, model.eos_token_ids
        )
        done = 0
        with Progress("computing again", report.note, len(tasks), "outputs") as progress:

            def count() -> None:
                nonlocal done
                done += 1
                progress.update(done)

            engine.run(tasks, count)
    finally:
        engine.close()


def _changes(conditions: Conditions, given: set[str]) -> dict[str, str | None]:
    """Return the settings of an engine that computes as a receipt says, without those that the operator gave.

    Formats that a checkpoint has itself need no setting. The C library for CPUs determines the dtype and the cache.
    """
    full = conditions.quantization == _FULL
    wanted: dict[str, str | None] = {"model": conditions.model}
    if conditions.revision is not None and MODEL not in given:
        wanted["revision"] = conditions.revision
    if full or conditions.quantization in QUANTIZATIONS:
        wanted["quantization"] = conditions.quantization
    if full and conditions.dtype in _DTYPES:
        wanted["dtype"] = conditions.dtype
    if _FP8 in conditions.kv_cache_dtype or "float8" in conditions.kv_cache_dtype:
        wanted["kv_cache_dtype"] = _FP8
    return {name: value for name, value in wanted.items() if name not in given}


def _note_conditions(
    tasks: Sequence[Task], now: Conditions, why: str, note: Callable[[str], None]
) -> None:
    """Say in which conditions receipts differ from those of an engine, before it computes.

    Adapters are none of them: an output has that of its receipt, or is not computed.

    Args:
        tasks: of the receipts.
        now: the conditions of the engine.
        why: it computes no request deterministically; empty if it does.
        note: says it.
    """
    receipts: dict[int, Receipt] = {id(task.receipt): task.receipt for task in tasks}
    found = Counter(
        "; ".join(
            differences(it.conditions, msgspec.structs.replace(now, adapter=it.conditions.adapter))
        )
        for it in receipts.values()
    )
    for text, number in found.items():
        if text:
            note(f"{_count(number, 'receipt')} of other conditions: {text}")
    if why and any(it.deterministic for it in receipts.values()):
        note(f"no request is computed deterministically: {why}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
