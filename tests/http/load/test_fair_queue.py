import asyncio
import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import OverloadedError
from server.http.load.fair_queue import FairPlaces


async def _settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def _asks(places: FairPlaces, clients: str, served: list[str]) -> list[asyncio.Task[None]]:
    async def ask(client: str) -> None:
        await places.acquire(client)
        served.append(client)

    return [asyncio.ensure_future(ask(client)) for client in clients]


@pytest.mark.anyio
async def test_a_client_alone_takes_all_places_at_once():
    places, served = FairPlaces(3), list[str]()
    _asks(places, "aaaa", served)
    await _settle()
    assert served == ["a", "a", "a"]
    assert places.num_waiting("a") == 1


@pytest.mark.anyio
async def test_clients_that_wait_take_turns_whoever_asked_first():
    places, served = FairPlaces(1), list[str]()
    _asks(places, "aaaaabbc", served)
    await _settle()
    for i in range(7):
        places.release(served[i])
        await _settle()
    assert "".join(served) == "a" + "abc" + "ab" + "aa"


@pytest.mark.anyio
async def test_a_caller_that_is_cancelled_while_it_waits_gets_no_place():
    places, served = FairPlaces(1), list[str]()
    tasks = _asks(places, "aabb", served)
    await _settle()
    tasks[1].cancel()
    tasks[2].cancel()
    places.release("a")
    await _settle()
    assert served == ["a", "b"]
    assert places.num_clients == 0
    places.release("b")
    await places.acquire("c")


@pytest.mark.anyio
async def test_a_place_that_comes_to_a_caller_as_it_is_cancelled_goes_to_the_next():
    places, served = FairPlaces(1), list[str]()
    tasks = _asks(places, "aab", served)
    await _settle()
    places.release("a")  # to the second, which has not run yet
    tasks[1].cancel()
    await _settle()
    assert served == ["a", "b"]


@pytest.mark.anyio
async def test_callers_of_one_client_beyond_its_limit_are_refused_and_those_of_others_are_not():
    places, served = FairPlaces(1, most_waiting=2, refusal="enough"), list[str]()
    tasks = _asks(places, "aaaab", served)
    await _settle()
    assert [task.done() for task in tasks] == [True, False, False, True, False]
    with pytest.raises(OverloadedError, match="enough"):
        tasks[3].result()
    assert places.num_waiting("b") == 1
    for task in tasks:
        task.cancel()


@pytest.mark.anyio
async def test_a_client_with_its_most_places_waits_although_some_are_free_and_others_do_not():
    places, served = FairPlaces(3, most_of_a_client=2), list[str]()
    _asks(places, "aaaab", served)
    await _settle()
    assert served == ["a", "a", "b"]
    places.release("b")
    await _settle()
    assert places.num_waiting("a") == 2
    places.release("a")
    await _settle()
    assert served == ["a", "a", "b", "a"]
    await places.acquire("c")


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.one_of(st.sampled_from(["", "b", "c", "d"]), st.integers(0, 9)), max_size=60),
)
def test_places_are_neither_lost_nor_left_free_and_no_client_is_passed_over_twice(
    count: int, most: int, moves: list[str | int]
):
    """A text is a caller of that client; a number ends a holder, if it is even, or cancels one that waits."""

    async def run() -> None:
        places = FairPlaces(count, most_of_a_client=most)
        waiting: dict[asyncio.Task[None], str] = {}
        holders: list[str] = []
        passed_over: collections.Counter[tuple[str, str]] = collections.Counter()

        async def ask(client: str) -> None:
            await places.acquire(client)
            holders.append(client)
            assert holders.count(client) <= most
            for other in {it for it in waiting.values() if it != client}:
                if holders.count(other) >= most:
                    continue
                passed_over[other, client] += 1
                assert passed_over[other, client] <= 1, f"{client} went twice before {other}"
            for pair in [pair for pair in passed_over if pair[0] == client]:
                del passed_over[pair]

        async def settle() -> None:
            await _settle()
            for task in [task for task in waiting if task.done()]:
                del waiting[task]
            for pair in [pair for pair in passed_over if pair[0] not in waiting.values()]:
                del passed_over[pair]
            assert len(holders) <= count
            may_hold = [it for it in waiting.values() if holders.count(it) < most]
            assert len(holders) == count or not may_hold, "a place is free, and a caller waits"
            for client in ("", "b", "c", "d"):
                assert places.num_waiting(client) == list(waiting.values()).count(client)

        for move in moves:
            if isinstance(move, str):
                waiting[asyncio.ensure_future(ask(move))] = move
            elif move % 2 and waiting:
                list(waiting)[move % len(waiting)].cancel()
            elif not move % 2 and holders:
                places.release(holders.pop(move % len(holders)))
            await settle()
        for task in waiting:
            task.cancel()
        await _settle()

    asyncio.run(run())
