"""Finds repositories in the local cache of the Hugging Face Hub. Asks no server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_MODEL: Final = "models--"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def folder_name(repository: str) -> str:
    """Return the name of a repository's folder in the cache, such as `models--Qwen--Qwen3-0.6B`."""
    return _MODEL + repository.replace("/", "--")


def repository_of(folder_name: str) -> str | None:
    """Return the repository whose folder in the cache has this name; None if it is that of no model."""
    if not folder_name.startswith(_MODEL):
        return None
    return folder_name.removeprefix(_MODEL).replace("--", "/", 1) or None


def cached_repositories() -> list[str]:
    """Return the repositories of models that have a snapshot in the cache, sorted."""
    # Imported here because a local folder does not need it.
    from huggingface_hub import constants  # noqa: PLC0415 - slow

    try:
        folders = list(Path(constants.HF_HUB_CACHE).glob(f"{_MODEL}*/snapshots/*"))
    except OSError:
        return []
    return sorted(filter(None, {repository_of(path.parents[1].name) for path in folders}))


def cached_spelling(repository: str) -> str:
    """Return the name under which the cache has a repository, whatever its case; the name itself if it has none."""
    cached = cached_repositories()
    if repository in cached:
        return repository
    folded = repository.casefold()
    return next((name for name in cached if name.casefold() == folded), repository)


def commit_of(checkpoint: Path) -> str | None:
    """Return the commit of a repository whose snapshot a folder, or the folder of a file, is; None if it is none."""
    for folder in (checkpoint, checkpoint.parent):
        if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
            return folder.name
    return None


def snapshot_in(folder: Path, revision: str | None) -> Path | None:
    """Return the snapshot of a revision in a repository's cache folder.

    Args:
        folder: such as `models--Qwen--Qwen3-0.6B`.
        revision: branch, tag or commit; None for the main branch, or for the only snapshot.

    Returns:
        A folder that exists, or None.
    """
    snapshots, name = folder / "snapshots", revision or "main"
    try:
        commit = (folder / "refs" / name).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = name
    if _COMMIT.fullmatch(commit) and (snapshots / commit).is_dir():
        return snapshots / commit
    only = [path for path in snapshots.iterdir() if path.is_dir()] if snapshots.is_dir() else []
    return only[0] if revision is None and len(only) == 1 else None
