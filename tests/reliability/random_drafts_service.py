"""Runs `tessera serve` with the engine of `tests.reliability.random_drafts_engine`.

python -m tests.reliability.random_drafts_service [options of tessera serve]
"""

from __future__ import annotations

import sys

from server.cli.command_settings import read_settings
from server.cli.serve import serve
from tests.reliability.random_drafts_engine import COMMAND

if __name__ == "__main__":
    serve(read_settings(sys.argv[1:]), COMMAND)
