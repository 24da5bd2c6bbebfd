"""A pytest hook that leaves most cases of costly parametrized tests to `make test-slow`.

Emulated kernels, generated models and compilations for absent GPUs repeat one behaviour on many shapes. `make test`
runs a few cases of each such test, the same at each run; the others are marked slow.
"""

from __future__ import annotations

import hashlib
from typing import Final

import pytest

MOST_CASES: Final = {
    "tests/benchmarks/": 4,
    "tests/docs/test_site.py": 1,
    "tests/e2e/": 1,
    "tests/engine/runner/": 5,
    "tests/http/dialects/": 12,
    "tests/http/test_bad_input.py": 30,
    "tests/http/test_values_of_every_type.py": 3,
    "tests/kernels/attention/": 4,
    "tests/kernels/attention/training/": 2,
    "tests/kernels/collective/": 1,
    "tests/kernels/compile/": 1,
    "tests/kernels/linear/": 8,
    "tests/kernels/norms/": 6,
    "tests/kernels/sampling/": 6,
    "tests/kernels/step/": 2,
    "tests/model/checkpoint/": 10,
    "tests/model/executors/": 4,
    "tests/model/network/": 8,
    "tests/model/sampling/": 12,
    "tests/model/test_parity.py": 12,
}
"""Cases of each test that run with `make test`, by the beginning of the path; the longest beginning counts."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases beyond the number that runs fast as slow."""
    cases = {}
    for item in items:
        name, bracket, _ = item.nodeid.partition("[")
        if bracket and not any(map(item.get_closest_marker, ("slow", "gpu", "latency"))):
            cases.setdefault(name, []).append(item)
    for name, group in cases.items():
        most = most_cases(name)
        if most is not None and len(group) > most:
            for item in sorted(group, key=_shuffled)[most:]:
                item.add_marker(pytest.mark.slow)


def most_cases(name: str) -> int | None:
    """Return how many cases of a test run fast; None means all."""
    found = [beginning for beginning in MOST_CASES if name.startswith(beginning)]
    return MOST_CASES[max(found, key=len)] if found else None


def _shuffled(item):
    return hashlib.sha256(item.nodeid.encode()).digest()
