"""How faults are written."""

import pytest

from tests.faults.spec import Fault, parse


def test_faults_are_parsed_with_their_options():
    text = "raise@step=5:row=2, nan@step=7:row=0:every=50, slow@step=4:seconds=2.5,oom@times=0"

    assert parse(text) == [
        Fault(kind="raise", step=5, row=2),
        Fault(kind="nan", step=7, row=0, every=50),
        Fault(kind="slow", step=4, seconds=2.5),
        Fault(kind="oom", times=0),
    ]
    assert parse("") == []


@pytest.mark.parametrize("text", ["explode@step=1", "raise@stpe=1", "raise@step=x", "raise@step"])
def test_a_fault_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ValueError, match=r"is none of|invalid literal"):
        parse(text)


def test_a_fault_that_repeats_is_due_at_its_steps():
    fault = Fault(kind="exit", step=3, every=100)

    assert [step for step in range(1, 300) if fault.is_due(step)] == [3, 103, 203]
