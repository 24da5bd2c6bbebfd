"""Most cases of costly parametrized tests are slow, the same at each run, and none is lost."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import sampled
from tests.sampled import MOST_CASES, most_cases, pytest_collection_modifyitems


class Item(SimpleNamespace):
    """A collected test."""

    def get_closest_marker(self, name):
        return name in self.marks

    def add_marker(self, mark):
        self.marks.append(mark.name)


def fast(names, *marks):
    items = [Item(nodeid=name, marks=list(marks)) for name in names]
    pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == names
    return [item.nodeid for item in items if "slow" not in item.marks]


def test_a_few_cases_of_each_test_are_fast_whatever_else_is_collected():
    path = "tests/kernels/norms/test_a.py"
    cases = [f"{path}::test_a[{i}]" for i in range(20)]
    others = [f"{path}::test_b[{i}]" for i in range(3)]

    found = fast(cases)

    assert len(found) == MOST_CASES["tests/kernels/norms/"]
    assert fast(cases[::-1] + others) == found[::-1] + others


@pytest.mark.parametrize(
    "name", ["tests/kernels/norms/test_a.py::test_a", "tests/cli/test_a.py::t[1]"]
)
def test_others_are_as_they_were(name):
    assert fast([name] * 50) == [name] * 50


def test_the_longest_beginning_counts():
    assert (
        most_cases("tests/kernels/attention/test_a.py::t") == MOST_CASES["tests/kernels/attention/"]
    )
    longer = "tests/kernels/attention/training/"
    assert most_cases(f"{longer}test_a.py::t") == MOST_CASES[longer]
    assert most_cases("tests/cli/test_a.py::t") is None


def test_every_entry_is_a_folder_or_file_of_tests():
    root = Path(sampled.__file__).parents[1]

    assert [path for path in MOST_CASES if not (root / path).exists()] == []
