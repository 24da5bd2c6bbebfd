"""Hostile templates stay within their limits of time and memory, and none escapes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("count", [45, pytest.param(500, marks=pytest.mark.slow)])
def test_no_hostile_template_takes_much_or_escapes(count) -> None:
    # In a process of its own, which knows the memory of its own children only.
    command = [sys.executable, "-m", "tests.reliability.templates", "--seconds", "0.3"]
    ran = subprocess.run(
        [*command, "--count", str(count), "--seed", "7"], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout)

    assert (found["escapes"], found["slow"]) == ([], [])
    assert found["peak_mib"] < 300
    # The templates do what they are written for.
    assert any("memory" in outcome for outcome in found["outcomes"])
    assert any("processor time" in outcome for outcome in found["outcomes"])
