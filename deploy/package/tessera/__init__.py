"""The name of an installation: `tessera.kernels`, `tessera.model` and `tessera.server`.

A wheel contains the three packages inside this one, because the name `kernels` belongs to a package of Hugging Face as
well (docs/decisions/0040-one-top-level-package.md). In a source tree they are top-level packages, and `tessera.kernels`
is another name of the same module `kernels`, so that programs import the same names from both.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

PACKAGES: Final = ("kernels", "model", "server")


class _SourceTree(MetaPathFinder, Loader):
    """Finds `tessera.x` as the module `x`, which is imported once, under its own name."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a spec if the name is that of one of our packages or inside of one."""
        del path, target
        parent, _, name = fullname.partition(".")
        if parent != __name__ or name.partition(".")[0] not in PACKAGES:
            return None
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the module's code, for `python -m tessera.server.ray.main`."""
        found = importlib.util.find_spec(fullname.removeprefix(f"{__name__}."))
        loader = None if found is None else found.loader
        return loader.get_code(found.name) if found and isinstance(loader, InspectLoader) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name."""
        module = importlib.import_module(spec.name.removeprefix(f"{__name__}."))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore what the import system changed: the module has run."""
        spec = module.__spec__
        assert spec is not None  # noqa: S101 - the import system has just set it
        module.__spec__ = spec.loader_state


if not Path(__file__).with_name(PACKAGES[0]).is_dir():
    # First, because the paths of our packages would otherwise be searched for modules of a second name.
    sys.meta_path.insert(0, _SourceTree())
