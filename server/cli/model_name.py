"""Replaces the name of a model as it was typed by the one that the service shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.hub.names import read_name

if TYPE_CHECKING:
    from server.cli.settings import Settings


def with_model_name(settings: Settings) -> Settings:
    """Return the settings with the repository and the revision that the model's name stands for.

    Raises:
        ModelFolderError: as `read_name`.
    """
    found = read_name(settings.model, settings.revision)
    changes = {"model": found.name, "revision": found.revision}
    kept = {name: it for name, it in changes.items() if it != getattr(settings, name)}
    return settings.model_copy(update=kept) if kept else settings
