"""`tessera list`, `tessera pull` and `tessera rm`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from model.checkpoint.config import ModelConfig
from model.errors import ModelError
from model.hub.cache import cached_repositories, cached_spelling
from model.hub.names import read_name
from model.hub.resolve import BUNDLED, resolve
from model.progress import bytes_text
from server.cli.local_models.scan import (
    LocalModel,
    cached_models,
    local_models,
    scan_cache,
)
from server.cli.output import fail, printable, write_result
from server.log import configure_logging

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from huggingface_hub import CachedRepoInfo

_COLUMNS = ("name", "size", "revision", "last used", "served")
_SHORT_COMMIT = 12
_FEWEST_DIGITS = 7
_AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))


def list_models(options: argparse.Namespace) -> None:
    """Print the models on this machine, with whether they can be served."""
    cache = scan_cache()
    models = local_models(cache)
    for warning in () if cache is None else cache.warnings:
        print(f"[not listed: {printable(' '.join(str(warning).split()))}]", file=sys.stderr)
    if options.json:
        write_result(msgspec.json.format(msgspec.json.encode(models), indent=2).decode())
        return
    rows = [_COLUMNS, *(tuple(map(printable, _row(model, time.time()))) for model in models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    write_result("\n".join(lines))


def pull(options: argparse.Namespace) -> None:
    """Download a model, unless it cannot be served, and print the folder that it is in.

    Exits with status 1 if there is no such model, or it is not supported.
    """
    configure_logging("info", "text")
    try:
        name = read_name(options.model, options.revision)
        if name.folder is not None:
            print(f"{name.name} is on this machine already", file=sys.stderr)
        # First, because weights that cannot be served need not be downloaded.
        ModelConfig.from_folder(resolve(options.model, options.revision, config_only=True))
        folder = resolve(options.model, options.revision, pickle=options.load_format == "pickle")
    except ModelError as error:
        fail(str(error), "pull")
    write_result(str(folder))


def remove(options: argparse.Namespace) -> None:
    """Delete models from the Hub's cache, or one revision of them.

    Exits with status 1 if one of them is not in the cache; then none is deleted.
    """
    cache = scan_cache()
    repositories = cached_models(cache)
    chosen: dict[str, list[str]] = {}
    for model in options.models:
        try:
            name, revision = _cached_name(model, options.revision)
        except ModelError as error:
            fail(str(error), "rm")
        if name not in repositories:
            fail(f"{name} is not in the Hugging Face cache; `tessera list` shows what is", "rm")
        commits = _commits(repositories[name], revision)
        if not commits:
            fail(f"{name} has no revision {revision!r} in the Hugging Face cache", "rm")
        chosen[name] = commits
    assert cache is not None
    for name, commits in chosen.items():
        # Of this repository only: those with a common history, and a renamed one, have the same commits.
        plan = replace(cache, repos=frozenset([repositories[name]])).delete_revisions(*commits)
        plan.execute()
        print(f"deleted {printable(name)}: {bytes_text(plan.expected_freed_size)}")


def _cached_name(model: str, revision: str | None) -> tuple[str, str | None]:
    """Return the repository and the revision that a name means; also one that cannot be served.

    Raises:
        ModelError: the name means no repository.
    """
    cached = cached_spelling(model)
    if cached in cached_repositories():
        return cached, revision
    found = read_name(model, revision)
    if found.tag:
        fail(
            f"{found.name} is a part of {found.repository}, which is deleted as a whole: give that",
            "rm",
        )
    if found.repository is None:
        what = "part of Tessera" if found.name == BUNDLED else "a folder or a file"
        fail(f"{found.name} is {what}; only models of the Hugging Face cache are deleted", "rm")
    return found.repository, found.revision


def _commits(repository: CachedRepoInfo, revision: str | None) -> list[str]:
    """Return the commits that a branch, a tag or the first digits of a commit name; all for None."""
    return [
        it.commit_hash
        for it in repository.revisions
        if revision is None
        or revision in it.refs
        or (len(revision) >= _FEWEST_DIGITS and it.commit_hash.startswith(revision))
    ]


def _row(model: LocalModel, now: float) -> tuple[str, ...]:
    return (
        model.name,
        bytes_text(model.size_bytes),
        ", ".join(_short(model.revisions)) or "-",
        "-" if model.last_used is None else _age(model.last_used, now),
        "yes" if model.supported else f"no: {model.why}",
    )


def _short(revisions: Iterable[str]) -> Iterable[str]:
    return (it if len(it) <= 2 * _SHORT_COMMIT else f"{it[:_SHORT_COMMIT]}..." for it in revisions)


def _age(moment: str, now: float) -> str:
    seconds = datetime.fromtimestamp(now, UTC) - datetime.fromisoformat(moment)
    for size, unit in _AGES:
        if (count := int(seconds.total_seconds()) // size) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "now"
