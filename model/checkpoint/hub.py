"""Finds or downloads the folder of a model. Does not import PyTorch."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Final

from model.errors import ModelFolderError

BUNDLED: Final = "bundled"
_BUNDLED_FOLDER = Path(__file__).parents[1] / BUNDLED

# Models from before the Hub had organisations, such as gpt2, have no slash.
_REPOSITORY: Final = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_NEEDED: Final = (
    "*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt",
)  # fmt: skip
_CONFIG: Final = ("config.json", "generation_config.json")
# Exports in subfolders, and copies of the weights in the original format: each would double the download.
# `additional_chat_templates` is the one folder that is needed.
_UNNEEDED: Final = (
    "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "consolidated*.safetensors",
)  # fmt: skip


def is_bundled(folder: Path) -> bool:
    """Return whether a folder is that of the checkpoint that is part of Tessera."""
    return folder.resolve() == _BUNDLED_FOLDER.resolve()


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
    path = _BUNDLED_FOLDER if model == BUNDLED else Path(model).expanduser()
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
    # Imported here because the import takes 0.2 s and a local folder does not need it.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    place = f"model {repository!r}" + (f" at revision {revision!r}" if revision else "")
    absent = f"; there is no folder {repository!r} either"
    if difflib.get_close_matches(repository, [BUNDLED], cutoff=0.7):
        absent += f"; did you mean '{BUNDLED}'?"
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_UNNEEDED),
            )
        )
    except errors.GatedRepoError:
        problem = "is gated: accept its terms on the Hub and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        problem = "does not exist: the repository has no such revision"
    except errors.RepositoryNotFoundError:
        problem = "does not exist on the Hugging Face Hub, or is private and HF_TOKEN is not set"
        problem += absent
    except errors.OfflineModeIsEnabled:
        problem = (
            "is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids fetching it" + absent
        )
    except errors.LocalEntryNotFoundError as error:
        # The hub library falls back to its cache when it cannot connect, whatever the cause.
        reason = "the Hub cannot be reached: " + _first_line(error)
        if error.__cause__ is None or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            reason = "HF_HUB_OFFLINE forbids fetching it"
        problem = f"is not in the Hugging Face cache, and {reason}{absent}"
    # The hub library does not wrap the errors of its HTTP library, which depends on its version.
    except Exception as error:  # noqa: BLE001
        problem = f"cannot be fetched: {type(error).__name__}: {_first_line(error)}"
    raise ModelFolderError(f"{place} {problem}")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
