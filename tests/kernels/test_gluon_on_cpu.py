"""Roles of a launch that run one at a time on a CPU."""

import pytest

from tests.kernels.gluon_on_cpu import MBarrier, NamedBarrier, run_roles, wait_until


def test_roles_wait_for_each_other_at_an_mbarrier():
    full, empty, seen = MBarrier(1), MBarrier(1), []

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


def test_a_stage_that_is_read_after_its_release_is_found():
    stage, empty, read = [0], MBarrier(1), []

    def produce():
        empty.wait(0)
        stage[0] = 1

    def consume():
        empty.arrive()
        read.append(stage[0])

    for seed in range(20):
        stage[0], empty.completed = 0, 0
        run_roles([produce, consume], seed)
    assert set(read) == {0, 1}


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
        (lambda barrier: (barrier.expect(8), barrier.invalidate()), "bytes that have not come"),
        (lambda barrier: (barrier.init(2), barrier.arrive(), barrier.invalidate()), "has begun"),
        (lambda barrier: (barrier.invalidate(), barrier.arrive()), "more arrivals"),
        (lambda barrier: (barrier.invalidate(), barrier.invalidate()), "not initialized"),
    ],
)
def test_an_mbarrier_that_is_used_wrongly_is_an_error(misuse, message):
    with pytest.raises(AssertionError, match=message):
        run_roles([lambda: misuse(MBarrier(1))])


def test_an_mbarrier_without_a_count_takes_no_arrival():
    with pytest.raises(AssertionError, match="more arrivals"):
        run_roles([MBarrier().arrive])
