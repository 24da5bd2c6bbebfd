"""Finds the models on this machine: those in the cache of the Hugging Face Hub, and the bundled one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from model.checkpoint.config import ModelConfig
from model.errors import ModelError
from model.gguf.select import checkpoints, gguf_in
from model.hub.installed_models import INSTALLED
from model.hub.resolve import BUNDLED, resolve
from model.json_input import read_json_object

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, HFCacheInfo

_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * 2**20
_INSTEAD = {
    "adapter_config.json": "it is an adapter, not a whole model",
    "model_index.json": "it is not a model of text",
}
"""Why a checkpoint without config.json is none, by a file that it has."""


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine.

    Attributes:
        name: as `tessera serve` takes it.
        size_bytes: of all its files, also of other revisions; of a GGUF checkpoint, of its files.
        revisions: branches and tags, and the commits that have none.
        commit: of the revision that `supported` is about; None for a model that has no commits.
        last_used: time in ISO 8601 at which a file was last read; None if it is not known.
        supported: whether this version can serve it.
        why: the reason if it cannot.
        path: of the folder with its config.json, or of its GGUF file.
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
    """Return the bundled model, those of installed packages and those in the cache of the Hub, by name."""
    cached = (it for repo in cached_models(cache).values() for it in _describe(repo))
    return [*_bundled(), *_installed(), *sorted(cached, key=lambda it: it.name.casefold())]


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


def _describe(repo: CachedRepoInfo) -> list[LocalModel]:
    """Return the model of a repository; of one with GGUF files, each of its checkpoints."""
    revision = newest(repo)
    refs = sorted({ref for it in repo.revisions for ref in it.refs})
    loose = sorted(it.commit_hash[:12] for it in repo.revisions if not it.refs)
    folder, gguf = revision.snapshot_path, {}
    if not (folder / "config.json").exists():
        gguf = checkpoints(gguf_in(folder), [f"{repo.repo_id}:{{}}"] * 2)
    found = [(repo.repo_id, repo.size_on_disk, folder)]
    if gguf:
        found = [
            (name, sum((folder / it).stat().st_size for it in files), folder / files[0])
            for name, files in gguf.items()
        ]
    reasons = [why_not(path, repo.repo_id) for _, _, path in found]
    return [
        LocalModel(
            name=name,
            size_bytes=size,
            revisions=refs + loose,
            commit=revision.commit_hash,
            last_used=_time(repo.last_accessed),
            supported=why is None,
            why=why,
            path=str(path),
        )
        for (name, size, path), why in zip(found, reasons, strict=True)
    ]


def _bundled() -> list[LocalModel]:
    try:
        folder = resolve(BUNDLED)
    except ModelError:
        return []
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return [_of_package(BUNDLED, folder, size)]


def _installed() -> list[LocalModel]:
    paths = {name: it.path() for name, it in INSTALLED.items()}
    return [_of_package(name, it, it.stat().st_size) for name, it in paths.items() if it]


def _of_package(name: str, path: Path, size: int) -> LocalModel:
    why = why_not(path, name)
    return LocalModel(
        name=name,
        size_bytes=size,
        revisions=[],
        commit=None,
        last_used=None,
        supported=why is None,
        why=why,
        path=str(path),
    )


def why_not(folder: Path, name: str) -> str | None:
    """Return why a checkpoint cannot be served, in one line; None if nothing that its files show is against it.

    Args:
        folder: of the checkpoint, or its GGUF file.
        name: of the model, for the command that completes it.
    """
    is_gguf = folder.is_file()
    if not is_gguf and not (folder / "config.json").is_file():
        found = (why for pattern, why in _INSTEAD.items() if next(folder.glob(pattern), None))
        return next(found, "it has no config.json")
    try:
        ModelConfig.from_folder(folder)
        missing = None if is_gguf else _missing(folder)
    except ModelError as error:
        file = f"{folder} " if is_gguf else f"{folder / 'config.json'}: "
        return " ".join(str(error).removeprefix(file).split())
    if missing is None and (is_gguf or (folder / "tokenizer.json").is_file()):
        return None
    missing = missing or "tokenizer.json"
    if missing == "model.safetensors" and next(folder.glob("*.bin"), None):
        return "its weights are pickle files, which only --load-format pickle reads"
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
