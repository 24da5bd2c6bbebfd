"""A real Prometheus that scrapes a real service under load for two minutes has data for all rules and panels."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.deploy.monitoring import all_expressions

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (package prometheus)"
)
def test_every_expression_of_rules_and_dashboard_has_data():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.dashboard", "--light", "--seconds=120"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found, asked = map(int, re.findall(r"^(\d+) of (\d+) expressions", done.stdout)[0])
    assert found == asked == len(all_expressions())
