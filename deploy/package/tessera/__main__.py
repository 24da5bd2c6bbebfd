"""`python -m tessera`: the command `tessera`."""

from __future__ import annotations

import importlib

# By its name, since type checkers do not see the packages of the source tree below this one.
importlib.import_module("tessera.server.cli.main").main()
