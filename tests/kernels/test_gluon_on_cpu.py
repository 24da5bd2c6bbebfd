"""Roles of a launch that run one at a time on a CPU."""

import pytest

from tests.kernels.gluon_on_cpu import MBarrier, NamedBarrier, run_roles, wait_until


def test_roles_wait_for_each_other_at_an_mbarrier():
    full, empty, seen = MBarrier(), MBarrier(), []

    def produce():
        for number in range(4):
            empty.wait((number & 1) ^ 1)
            seen.append(("write", number))
            full.expect(8)
            full.receive(8)

    def consume():
        for number in range(4):
            full.wait(number & 1)
            seen.append(("read", number))
            empty.arrive()

    run_roles([consume, produce])

    assert seen == [(what, number) for number in range(4) for what in ("write", "read")]


def test_roles_that_wait_for_each_other_are_a_deadlock():
    one, other = NamedBarrier(), NamedBarrier()

    def first():
        one.wait()
        other.arrive()

    def second():
        other.wait()
        one.arrive()

    with pytest.raises(AssertionError, match="deadlock"):
        run_roles([first, second])


def test_a_wait_outside_of_roles_for_what_never_comes_is_a_deadlock():
    with pytest.raises(AssertionError, match="deadlock"):
        MBarrier().wait(0)


def test_an_error_of_a_role_ends_the_others():
    begun, ended = [], []

    def waits():
        begun.append(True)
        try:
            wait_until(lambda: False)
        finally:
            ended.append(True)

    def fails():
        wait_until(lambda: len(begun) == 2)
        raise ValueError("of a role")

    with pytest.raises(ValueError, match="of a role"):
        run_roles([waits, fails, waits])
    assert len(ended) == 2


def test_the_order_of_roles_is_the_same_in_each_run():
    def order():
        seen = []
        run_roles([lambda number=number: seen.append(number) for number in range(20)])
        return seen

    assert order() == order() != list(range(20))


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda barrier: (barrier.arrive(), barrier.init(2), barrier.arrive(3)), "more arrivals"),
        (lambda barrier: barrier.receive(1), "more bytes"),
    ],
)
def test_an_mbarrier_that_is_used_wrongly_is_an_error(misuse, message):
    with pytest.raises(AssertionError, match=message):
        misuse(MBarrier())
