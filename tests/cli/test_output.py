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


@pytest.mark.parametrize("closed", ["0<&-", ">&-", "2>&-", "0<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_as_the_null_device(closed):
    code = "import os; from server.cli.main import main; main(['version']); print(os.open('.', 0))"
    found = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.returncode == 0
    assert found.stderr == ""
    if ">&-" not in closed.replace("2>&-", ""):
        assert int(found.stdout.split()[-1]) > 2
