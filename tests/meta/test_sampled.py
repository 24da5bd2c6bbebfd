"""Most cases of costly parametrized tests are slow, the same at each run, and each is repeated by some commit."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import sampled
from tests.sampled import MOST_CASES, ONE_IN, most_cases, pytest_collection_modifyitems


class Item:
    """A collected test."""

    def __init__(self, nodeid, marks, fixturenames):
        self.nodeid, self.marks, self.fixturenames = nodeid, marks, fixturenames

    def get_closest_marker(self, name):
        return name in self.marks

    def add_marker(self, mark):
        self.marks.append(mark.name)


def collected(names, *marks, commit="", fixtures=(), **options):
    """Return what a run with some options has left, and what it has deselected."""
    deselected = []

    def deselect(items):
        deselected.extend(items)

    options = {"all_cases": False, "keyword": "", "args": ["tests"]} | options
    config = SimpleNamespace(
        option=SimpleNamespace(keyword=options["keyword"]),
        args=options["args"],
        getoption=options.get,
        hook=SimpleNamespace(pytest_deselected=deselect),
    )
    items = [Item(nodeid=name, marks=list(marks), fixturenames=fixtures) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampled, "checked_out", lambda: commit)
        pytest_collection_modifyitems(config, items)
    assert {it.nodeid for it in [*items, *deselected]} == set(names)
    return items, deselected


def fast(names, *marks):
    items, deselected = collected(names, *marks)
    assert all("slow" in item.marks for item in deselected)
    return [item.nodeid for item in items if "slow" not in item.marks]


def test_a_few_cases_of_each_test_are_fast_whatever_else_is_collected():
    path = "tests/kernels/norms/test_a.py"
    cases = [f"{path}::test_a[{i}]" for i in range(20)]
    others = [f"{path}::test_b[{i}]" for i in range(3)]

    found = fast(cases)

    assert len(found) == MOST_CASES["tests/kernels/norms/"]
    assert fast(cases[::-1] + others) == found[::-1] + others


@pytest.mark.parametrize(
    "name", ["tests/kernels/norms/test_a.py::test_a", "tests/meta/test_a.py::t[1]"]
)
def test_others_are_as_they_were(name):
    assert fast([name] * 50) == [name] * 50


MANY = [f"tests/kernels/norms/test_a.py::test_a[{i}]" for i in range(200)]


def test_each_commit_repeats_another_share_of_the_slow_cases():
    slow = set(MANY) - set(fast(MANY))
    shares = []
    for commit in map(str, range(40)):
        items, _ = collected(MANY, commit=commit)
        shares.append({item.nodeid for item in items if "slow" in item.marks})
        assert len(shares[-1]) == math.ceil(len(slow) / ONE_IN)
    assert set().union(*shares) == slow
    assert shares[0] != shares[1]


def test_cases_that_the_test_marks_as_slow_are_shared_too_and_one_of_each_test_is_repeated():
    items, deselected = collected(MANY[:3], "slow")

    assert (len(items), len(deselected)) == (1, 2)


@pytest.mark.parametrize(
    "how",
    [{"all_cases": True}, {"keyword": "a"}, {"args": MANY[:1]}, {"fixtures": ["compile_job"]}],
    ids=str,
)
def test_all_cases_are_repeated_if_asked_for_and_compilations_are_chosen_elsewhere(how):
    assert collected(MANY, **how)[1] == []


def test_the_longest_beginning_counts():
    assert (
        most_cases("tests/kernels/attention/test_a.py::t") == MOST_CASES["tests/kernels/attention/"]
    )
    longer = "tests/kernels/attention/training/"
    assert most_cases(f"{longer}test_a.py::t") == MOST_CASES[longer]
    assert most_cases("tests/meta/test_a.py::t") is None


def test_every_entry_is_a_folder_or_file_of_tests():
    root = Path(sampled.__file__).parents[1]

    assert [path for path in MOST_CASES if not (root / path).exists()] == []
