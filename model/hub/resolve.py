"""Finds or downloads the folder of a model. Does not import PyTorch."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from model.errors import PICKLE_ADVICE, ModelFolderError
from model.gguf.select import gguf_in, select
from model.hub.cache import cached_repositories, folder_name, snapshot_in
from model.hub.file_download import is_connection_error, is_disk_full, reason
from model.hub.names import BUNDLED, BUNDLED_FOLDER, ModelName, read_name, well_known

__all__ = ["BUNDLED", "cached", "is_bundled", "resolve"]

_NEEDED: Final = (
    "*.json", "README.md", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt",
)  # fmt: skip
_OTHER_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl")
_UNAUTHORIZED: Final = 401
_CONFIG: Final = (
    "config.json", "generation_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json",
    "adapter_config.json", "model_index.json", "modules.json", "params.json", "README.md",
)  # fmt: skip
_PICKLES: Final = ("pytorch_model*.bin",)
_LISTED: Final = 3
# Exports in subfolders, and copies of the weights in the original format: each would double the download.
# `additional_chat_templates` is the one folder that is needed.
_UNNEEDED: Final = (
    "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "consolidated*.safetensors",
)  # fmt: skip


def is_bundled(folder: Path) -> bool:
    """Return whether a folder is that of the checkpoint that is part of Tessera."""
    return folder.resolve() == BUNDLED_FOLDER.resolve()


def resolve(
    model: str,
    revision: str | None = None,
    *,
    config_only: bool = False,
    pickle: bool | None = None,
) -> Path:
    """Find the folder of a model; download it into the Hugging Face cache if necessary.

    Args:
        model: a name as `names.read_name` understands it. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN apply.
        revision: branch, tag or commit of a repository; None for that in the name, or the main branch.
        config_only: download neither weights nor tokenizer, only what `ModelConfig.from_folder` reads or tells other
            folders by. Of a GGUF file that is the whole file.
        pickle: of a repository without safetensors files: whether to download its pickle files, or to refuse it
            because it has only these; None to do neither.

    Returns:
        An existing folder, or a GGUF file.

    Raises:
        ModelFolderError: there is no such folder or repository, it cannot be downloaded, a revision is given for a
            folder, or `pickle` refuses it.
    """
    name = read_name(model, revision)
    if name.folder is not None:
        return name.folder
    assert name.repository is not None
    folder = _fetch(name, _CONFIG, None) if config_only else _fetch(name, _NEEDED, pickle)
    if name.tag or (not (folder / "config.json").exists() and gguf_in(folder)):
        return folder / _selected(name, gguf_in(folder))[0]
    return folder


def cached(name: ModelName) -> Path | None:
    """Find the folder of a model on this machine, without asking a server.

    Returns:
        A folder or a GGUF file, whose other files may be missing; None for a repository whose revision the Hugging Face
        cache lacks.

    Raises:
        ModelFolderError: the cache has no GGUF file, or several, for the name's tag.
    """
    if name.folder is not None:
        return name.folder
    assert name.repository is not None
    # Imported here because a local folder does not need it.
    from huggingface_hub import constants  # noqa: PLC0415 - slow

    storage = Path(constants.HF_HUB_CACHE).expanduser() / folder_name(name.repository)
    folder = snapshot_in(storage, name.revision)
    if folder is None:
        return None
    if name.tag or (not (folder / "config.json").exists() and gguf_in(folder)):
        return folder / _selected(name, gguf_in(folder))[0]
    return folder


def _selected(name: ModelName, files: list[str]) -> list[str]:
    """Return the GGUF files that a name means, of those of its repository."""
    repository = name.repository
    assert repository is not None
    return select(files, name.tag, repository, [f"{repository}:{{}}"] * 2)


def _pickles(
    repository: str, files: list[str], patterns: tuple[str, ...], pickle: bool | None
) -> list[str] | None:
    """Return the files to download of a repository whose weights are pickle files; None for any other."""
    from huggingface_hub.utils import filter_repo_objects  # noqa: PLC0415 - slow

    top = [it for it in files if "/" not in it]
    pickles = list(filter_repo_objects(top, allow_patterns=[*_PICKLES]))
    if pickle is None or not pickles or any(it.endswith(".safetensors") for it in top):
        return None
    if not pickle:
        names = ", ".join(pickles[:_LISTED])
        raise ModelFolderError(
            f"repository {repository!r} holds its weights as pickle only ({names}); {PICKLE_ADVICE}"
        )
    others = filter_repo_objects(files, allow_patterns=[*patterns], ignore_patterns=[*_UNNEEDED])
    return [*others, *pickles]


def _fetch(name: ModelName, patterns: tuple[str, ...], pickle: bool | None) -> Path:
    repository, revision = name.repository, name.revision
    assert repository is not None

    def choose(files: list[str]) -> list[str] | None:
        """Return the files to download, GGUF or pickle; None for the files that match the patterns."""
        if name.tag or not any(it.endswith(_OTHER_WEIGHTS) for it in files):
            gguf = [it for it in files if it.lower().endswith(".gguf")]
            return _selected(name, gguf) if gguf or name.tag else None
        return _pickles(repository, files, patterns, pickle)

    # Imported here because a local folder does not need it.
    from model.hub.download import download  # noqa: PLC0415 - as above

    try:
        return download(repository, revision, patterns, _UNNEEDED, choose)
    except ModelFolderError:
        raise
    # The hub library does not wrap the errors of its HTTP library, which depends on its version.
    except Exception as error:  # noqa: BLE001 - as above
        place = f"model {repository!r}" + (f" at revision {revision!r}" if revision else "")
        raise ModelFolderError(f"{place} {_problem(error, repository)}") from None


def _problem(error: Exception, repository: str) -> str:
    """Say what is wrong in one line, and what to do; the end of a sentence."""
    from huggingface_hub import constants, errors, get_token  # noqa: PLC0415 - slow

    absent = f"; there is no folder {repository!r} either"
    if difflib.get_close_matches(repository, [BUNDLED], cutoff=0.7):
        absent += f"; did you mean '{BUNDLED}'?"
    elif others := _same_last_part(repository):
        absent += f"; did you mean {' or '.join(others)}?"
    incomplete = getattr(errors, "IncompleteSnapshotError", ())  # not in versions before 1.8
    partly = isinstance(error.__cause__, incomplete)
    cached = f"is {'only partly' if partly else 'not'} in the Hugging Face cache"
    absent = "" if partly else absent
    has_token = get_token() is not None
    page = f"{constants.ENDPOINT}/{repository}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    problem = f"cannot be fetched: {type(error).__name__}: {reason(error)}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        problem = f"{cached}, and HF_HUB_OFFLINE forbids fetching it{absent}"
    elif is_connection_error(error):
        hub = f"the Hub ({constants.ENDPOINT})"
        problem = f"{cached}, and {hub} cannot be reached: {reason(error)}{absent}"
    elif isinstance(error, errors.GatedRepoError):
        who = "the account of your token" if has_token else "an account, and set HF_TOKEN"
        problem = f"is gated: accept its terms at {page} with {who}"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = f"does not exist: the repository has no such revision ({page}/tree/main)"
    elif isinstance(error, errors.RepositoryNotFoundError):
        private = "your token may not read it" if has_token else "HF_TOKEN is not set"
        problem = f"does not exist on the Hugging Face Hub, or is private and {private}{absent}"
    elif status == _UNAUTHORIZED:
        problem = "cannot be fetched: the Hub does not accept your token (HF_TOKEN)"
    elif is_disk_full(error):
        cache = constants.HF_HUB_CACHE
        problem = f"cannot be fetched: the disk of {cache} is full; make space, or set HF_HOME"
    return problem


def _same_last_part(repository: str) -> list[str]:
    """Return the well-known and the cached repositories of other organisations whose names end in the same word."""
    last = repository.rpartition("/")[2].casefold()
    cached = (name for name in cached_repositories() if name.rpartition("/")[2].casefold() == last)
    others = filter(None, dict.fromkeys((well_known(last), *cached)))
    return [name for name in others if name.casefold() != repository.casefold()][:3]
