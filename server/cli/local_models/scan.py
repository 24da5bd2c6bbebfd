"""Finds the models on this machine: those in the cache of the Hugging Face Hub, and the bundled one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from model.checkpoint.config import ModelConfig
from model.checkpoint.other_folders import describe
from model.errors import ModelError
from model.hub.resolve import BUNDLED, resolve
from model.json_input import read_json_object

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * 2**20


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine.

    Attributes:
        name: as `tessera serve` takes it.
        size_bytes: of all its files, also of other revisions.
        revisions: branches and tags, and the commits that have none.
        commit: of the revision that `supported` is about; None for a model that has no commits.
        last_used: time in ISO 8601 at which a file was last read; None if it is not known.
        supported: whether this version can serve it.
        why: the reason if it cannot.
        path: of the folder with its config.json.
    """

    name: str
    size_bytes: int
    revisions: list[str]
    commit: str | None
    last_used: str | None
    supported: bool
    why: str | None
    path: str


def local_models(cache: HFCacheInfo | None) -> list[LocalModel]:
    """Return the bundled model and those in the cache of the Hub, by name."""
    cached = (_describe(repo) for repo in cached_models(cache).values())
    return [*_bundled(), *sorted(cached, key=lambda it: it.name.casefold())]


def scan_cache() -> HFCacheInfo | None:
    """Read the cache of the Hub, with its data sets; None if there is no cache."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir  # noqa: PLC0415 - slow

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError, OSError):  # ValueError: the cache is a file
        return None


def cached_models(cache: HFCacheInfo | None) -> dict[str, CachedRepoInfo]:
    """Return the models in the cache by name, without those of which nothing has been downloaded."""
    repos = () if cache is None else cache.repos
    return {it.repo_id: it for it in repos if it.repo_type == "model" and it.revisions}


def newest(repo: CachedRepoInfo) -> CachedRevisionInfo:
    """Return the revision that is served unless another is named: the main branch, or the latest."""
    return max(repo.revisions, key=lambda it: ("main" in it.refs, it.last_modified))


def _describe(repo: CachedRepoInfo) -> LocalModel:
    revision = newest(repo)
    refs = sorted({ref for it in repo.revisions for ref in it.refs})
    loose = sorted(it.commit_hash[:12] for it in repo.revisions if not it.refs)
    why = why_not(revision.snapshot_path, repo.repo_id)
    return LocalModel(
        name=repo.repo_id,
        size_bytes=repo.size_on_disk,
        revisions=refs + loose,
        commit=revision.commit_hash,
        last_used=_time(repo.last_accessed),
        supported=why is None,
        why=why,
        path=str(revision.snapshot_path),
    )


def _bundled() -> list[LocalModel]:
    try:
        folder = resolve(BUNDLED)
    except ModelError:
        return []
    why = why_not(folder, BUNDLED)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return [
        LocalModel(
            name=BUNDLED,
            size_bytes=size,
            revisions=[],
            commit=None,
            last_used=None,
            supported=why is None,
            why=why,
            path=str(folder),
        )
    ]


def why_not(folder: Path, name: str) -> str | None:
    """Return why a checkpoint cannot be served, in one line; None if nothing that its files show is against it.

    Args:
        folder: of the checkpoint.
        name: of the model, for the command that completes it.
    """
    if not (folder / "config.json").is_file():
        return describe(folder) or "it has no config.json"
    try:
        ModelConfig.from_folder(folder)
        missing = _missing(folder)
    except ModelError as error:
        return " ".join(str(error).removeprefix(f"{folder / 'config.json'}: ").split())
    if missing is None and (folder / "tokenizer.json").is_file():
        return None
    missing = missing or "tokenizer.json"
    if missing == "model.safetensors" and next(folder.glob("*.bin"), None):
        return "its weights are pickle files, which are never opened"
    return f"{missing} is missing; `tessera pull {name}` downloads it"


def _missing(folder: Path) -> str | None:
    """Return the name of a file of weights that is not there; None if all are.

    Raises:
        ModelError: the index of the files is broken.
    """
    index = read_json_object(folder, _INDEX, _MAX_INDEX_BYTES)
    if index is None:
        return None if (folder / "model.safetensors").is_file() else "model.safetensors"
    files = index.get("weight_map")
    names = sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
    return next((name for name in names if not (folder / Path(name).name).is_file()), None)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
