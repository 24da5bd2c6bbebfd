"""Finds or downloads the folder of a model. Does not import PyTorch."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Final

from model.checkpoint.transfer import is_connection_error, is_disk_full, reason
from model.errors import ModelFolderError

BUNDLED: Final = "bundled"

# Models from before the Hub had organisations, such as gpt2, have no slash.
_REPOSITORY: Final = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_NEEDED: Final = (
    "*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt",
)  # fmt: skip
_UNAUTHORIZED: Final = 401
_CONFIG: Final = ("config.json", "generation_config.json")
# Exports in subfolders, and copies of the weights in the original format: each would double the download.
# `additional_chat_templates` is the one folder that is needed.
_UNNEEDED: Final = (
    "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "consolidated*.safetensors",
)  # fmt: skip


def resolve(model: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """Find the folder of a model; download it into the Hugging Face cache if necessary.

    Args:
        model: "bundled" for the checkpoint that is part of Tessera, the path of a folder, or the name of a repository
            on the Hugging Face Hub, `organisation/name` or `name`, unless there is a folder of that name.
            HF_HUB_OFFLINE, HF_HOME and HF_TOKEN apply.
        revision: branch, tag or commit of the repository; None for its main branch.
        config_only: download neither weights nor tokenizer, only what `ModelConfig.from_folder` reads.

    Returns:
        An existing folder.

    Raises:
        ModelFolderError: there is no such folder or repository, it cannot be downloaded, or a revision
            is given for a folder.
    """
    path = Path(__file__).parents[1] / BUNDLED if model == BUNDLED else Path(model).expanduser()
    if model and path.is_dir():
        if revision is not None:
            raise ModelFolderError(
                f"revision {revision!r} is given, but {path} is a folder; only repositories of the"
                " Hugging Face Hub have revisions"
            )
        return path
    if model and path.exists():
        raise ModelFolderError(f"{path} is a file; a model is a folder with a config.json")
    if model == BUNDLED:
        raise ModelFolderError(f"the bundled model is missing from this installation: no {path}")
    if not _REPOSITORY.fullmatch(model):
        raise ModelFolderError(
            f"no folder {model!r}; a model is the path of a folder, 'organisation/name' on the"
            f" Hugging Face Hub, or '{BUNDLED}'"
        )
    return _fetch(model, revision, _CONFIG if config_only else _NEEDED)


def _fetch(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    # Imported here because a local folder does not need it.
    from model.checkpoint.download import download  # noqa: PLC0415

    try:
        return download(repository, revision, patterns, _UNNEEDED)
    except ModelFolderError:
        raise
    # The hub library does not wrap the errors of its HTTP library, which depends on its version.
    except Exception as error:  # noqa: BLE001
        place = f"model {repository!r}" + (f" at revision {revision!r}" if revision else "")
        raise ModelFolderError(f"{place} {_problem(error, repository)}") from None


def _problem(error: Exception, repository: str) -> str:
    """Say what is wrong in one line, and what to do; the end of a sentence."""
    from huggingface_hub import constants, errors, get_token  # noqa: PLC0415 - slow

    absent = f"; there is no folder {repository!r} either"
    if difflib.get_close_matches(repository, [BUNDLED], cutoff=0.7):
        absent += f"; did you mean '{BUNDLED}'?"
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
