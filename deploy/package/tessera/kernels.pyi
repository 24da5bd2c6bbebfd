"""For type checkers in an editable installation, where `tessera.kernels` is the module `kernels`."""

from kernels import *  # noqa: F403 - what the package exports
