"""What is written to standard output."""

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("words", [["version"], ["--version"], ["list"]])
def test_a_result_that_cannot_be_written_is_one_line_and_no_traceback(words):
    with FULL.open("w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "server.cli.main", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert found.stderr == "tessera: error: standard output: No space left on device\n"
    assert found.returncode == 1
