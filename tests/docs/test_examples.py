"""The examples in Python and for a shell in docs/quickstart/application.md run against a service."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.service import service

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

PAGE = (Path(__file__).parents[2] / "docs/quickstart/application.md").read_text()
NEEDS_MORE = "# needs: pip install"
"""Begins an example with a package that is not installed for tests."""


@pytest.fixture(scope="module")
def address():
    with service(("--model=bundled",)) as (url, _):
        yield url.removeprefix("http://")


def examples(language, address):
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 2
    own = [block for block in blocks if not block.startswith(NEEDS_MORE)]
    return [block.replace("localhost:8000", address) for block in own]


def test_examples_in_python_run(address):
    program = "\n".join(examples("python", address))

    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert not ran.returncode, ran.stderr
    assert "{'name': " in ran.stdout


def test_examples_for_a_shell_get_replies(address):
    for example in examples("bash", address):
        ran = subprocess.run(
            ["bash", "-euc", example.replace("curl ", "curl --fail-with-body ")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert not ran.returncode, ran.stdout
        assert '"error' not in ran.stdout
