"""Which of many equal tests a run repeats: a share of them that the hash of the commit chooses.

Each commit repeats another share, so that all of them run in time. `--all-cases` repeats all of them, and so does a run
that names tests.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path


def checked_out():
    """Return the hash of the commit that is checked out; nothing outside of a repository."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def draw(name, commit):
    """Return a number that is drawn for a test at a commit."""
    return int(hashlib.sha256(f"{commit} {name}".encode()).hexdigest(), 16)


def takes_all(config):
    """Return whether a run repeats all tests: it is asked to, or names those that it runs."""
    named = config.option.keyword or any("::" in it for it in config.args)
    return bool(config.getoption("all_cases") or named)
