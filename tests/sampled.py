"""pytest hooks that leave most cases of costly parametrized tests to `make test-slow`, and some to other commits.

Emulated kernels, generated models and compilations for absent GPUs repeat one behaviour on many shapes. `make test`
runs a few cases of each such test, the same at each run. The others are marked slow. A run of the slow tests repeats a
share of each test's slow cases, another one for each commit; `--all-cases` leaves out none.
"""

from __future__ import annotations

import collections
import math
from typing import Final

import pytest

from tests.commit_share import checked_out, draw, takes_all

MOST_CASES: Final = {
    "tests/benchmarks/": 4,
    "tests/cli/": 2,
    "tests/deploy/test_public_names.py": 4,
    "tests/docs/test_site.py": 1,
    "tests/e2e/": 1,
    "tests/engine/link/front_end/": 1,
    "tests/engine/runner/": 1,
    "tests/http/dialects/": 1,
    "tests/http/edge/test_hosts.py": 5,
    "tests/http/test_bad_input.py": 20,
    "tests/http/test_conversations.py": 12,
    "tests/http/test_streamed_text.py": 1,
    "tests/http/test_values_of_every_type.py": 1,
    "tests/kernels/attention/": 1,
    "tests/kernels/attention/training/": 1,
    "tests/kernels/collective/": 1,
    "tests/kernels/compile/": 1,
    "tests/kernels/linear/": 4,
    "tests/kernels/linear/test_select.py": 500,
    "tests/kernels/norms/": 4,
    "tests/kernels/sampling/": 4,
    "tests/kernels/step/": 1,
    "tests/kernels/step/test_schedule.py": 2,
    "tests/kernels/step/test_schedule_mutations.py": 12,
    "tests/model/checkpoint/": 4,
    "tests/model/executors/": 1,
    "tests/model/gguf/": 10,
    "tests/model/gguf/test_hostile_files.py": 50,
    "tests/model/gguf/test_parity.py": 1,
    "tests/model/families/": 3,
    "tests/model/network/": 6,
    "tests/model/sampling/": 3,
    "tests/model/test_files.py": 10,
    "tests/model/test_parity.py": 8,
    "tests/model/text/": 10,
}
"""Cases of each test that run with `make test`, by the beginning of the path; the longest beginning counts."""


_OTHERS: Final = ("gpu", "latency")
ONE_IN: Final = 4
"""Of so many slow cases of such a test a run repeats one, and at least one of each test."""


def pytest_addoption(parser):
    parser.addoption(
        "--all-cases",
        action="store_true",
        help="also the slow cases, and the compilations for absent GPUs, that other commits repeat",
    )


def pytest_report_header(config):
    if "slow" not in config.option.markexpr.replace("not slow", ""):
        return None
    if takes_all(config):
        return "slow cases of costly tests: all"
    commit = checked_out()[:8] or "no commit"
    return f"slow cases of costly tests: 1 in {ONE_IN}, by {commit}; --all-cases runs all"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the cases beyond the number that runs fast as slow, and deselect those that other commits repeat."""
    cases = collections.defaultdict(list)
    for item in items:
        name, bracket, _ = item.nodeid.partition("[")
        if bracket and most_cases(name) and not any(map(item.get_closest_marker, _OTHERS)):
            cases[name].append(item)
    for name, group in cases.items():
        fast = [item for item in group if not item.get_closest_marker("slow")]
        for item in sorted(fast, key=lambda it: draw(it.nodeid, ""))[most_cases(name) :]:
            item.add_marker(pytest.mark.slow)
    if not takes_all(config):
        commit, left_out = checked_out(), set()
        for group in cases.values():
            # Compilations are chosen by what they depend on (tests/kernels/compile/manifest).
            slow = [
                item
                for item in group
                if item.get_closest_marker("slow") and "compile_job" not in item.fixturenames
            ]
            slow.sort(key=lambda it: draw(it.nodeid, commit))
            left_out.update(slow[math.ceil(len(slow) / ONE_IN) :])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def most_cases(name: str) -> int | None:
    """Return how many cases of a test run fast; None means all."""
    found = [beginning for beginning in MOST_CASES if name.startswith(beginning)]
    return MOST_CASES[max(found, key=len)] if found else None
