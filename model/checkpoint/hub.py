"""Finds or downloads the folder of a model. Does not import PyTorch."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Final

from model.checkpoint.hub_cache import cached_repositories
from model.checkpoint.names import BUNDLED, read_name, well_known
from model.errors import ModelFolderError

__all__ = ["BUNDLED", "resolve"]

_NEEDED: Final = (
    "*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt",
)  # fmt: skip
_CONFIG: Final = ("config.json", "generation_config.json")
# Exports in subfolders, and copies of the weights in the original format: each would double the download.
# `additional_chat_templates` is the one folder that is needed.
_UNNEEDED: Final = (
    "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt", "consolidated*.safetensors",
)  # fmt: skip


def resolve(model: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """Find the folder of a model; download it into the Hugging Face cache if necessary.

    Args:
        model: a name as `names.read_name` understands it. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN apply.
        revision: branch, tag or commit of a repository; None for that in the name, or the main branch.
        config_only: download neither weights nor tokenizer, only what `ModelConfig.from_folder` reads.

    Returns:
        An existing folder.

    Raises:
        ModelFolderError: there is no such folder or repository, it cannot be downloaded, or a revision
            is given for a folder.
    """
    name = read_name(model, revision)
    if name.folder is not None:
        return name.folder
    assert name.repository is not None
    return _fetch(name.repository, name.revision, _CONFIG if config_only else _NEEDED)


def _fetch(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    # Imported here because the import takes 0.2 s and a local folder does not need it.
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415

    place = f"model {repository!r}" + (f" at revision {revision!r}" if revision else "")
    absent = f"; there is no folder {repository!r} either"
    if difflib.get_close_matches(repository, [BUNDLED], cutoff=0.7):
        absent += f"; did you mean '{BUNDLED}'?"
    elif others := _same_last_part(repository):
        absent += f"; did you mean {' or '.join(others)}?"
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


def _same_last_part(repository: str) -> list[str]:
    """Return the well-known and the cached repositories of other organisations whose names end in the same word."""
    last = repository.rpartition("/")[2].casefold()
    cached = (name for name in cached_repositories() if name.rpartition("/")[2].casefold() == last)
    others = filter(None, dict.fromkeys((well_known(last), *cached)))
    return [name for name in others if name.casefold() != repository.casefold()][:3]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
