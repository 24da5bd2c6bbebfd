"""Finds the model that a receipt names: on this machine, unless a download is allowed, since a receipt is untrusted."""

from __future__ import annotations

import dataclasses

from model.errors import ModelFolderError
from model.hub.names import read_name
from model.hub.resolve import cached


def model_settings(
    model: str, revision: str | None, *, may_download: bool
) -> dict[str, str | None]:
    """Return the settings of an engine for the model that a receipt names, `revision` too if it is of a repository.

    It asks no server.

    Args:
        model: as the receipt names it.
        revision: commit of its repository; None if it has none.
        may_download: whether the operator allows that it is downloaded.

    Raises:
        ModelFolderError: it is not on this machine and may not be downloaded, or its name cannot be read.
    """
    name = read_name(model)
    if name.folder is not None:
        return {"model": model}
    name = dataclasses.replace(name, revision=revision or name.revision)
    if may_download:
        return {"model": name.name, "revision": name.revision}
    found = cached(name)
    if found is None:
        raise ModelFolderError(
            f"the receipts name the model {model!r:.200} at {_at(name.revision)}, which is not on this machine: give a "
            "model of yours with --model, or allow the download with --allow-download"
        )
    return {"model": str(found), "revision": None}


def _at(revision: str | None) -> str:
    return "no revision" if revision is None else f"revision {revision!r:.60}"
