"""Equal shares: a client alone may have everything, and one below its share is never refused."""

from hypothesis import given
from hypothesis import strategies as st

from server.http.load.shares import Shares

LIMIT = 12
CLIENTS = st.sampled_from("abcd")


def test_a_client_alone_holds_all_and_a_second_one_still_gets_its_half():
    shares = Shares()
    while shares.allows("a", 1, LIMIT):
        shares.add("a", 1)
    assert shares.total == LIMIT

    for _ in range(LIMIT // 2):
        assert shares.allows("b", 1, LIMIT)
        shares.add("b", 1)

    assert not shares.allows("b", 1, LIMIT)
    assert not shares.allows("a", 1, LIMIT)


def test_what_a_client_gives_back_goes_to_those_below_their_share_first():
    shares = Shares()
    shares.add("a", LIMIT)
    shares.add("b", LIMIT // 2)

    shares.add("a", -1)

    assert not shares.allows("a", 1, LIMIT)


def test_a_client_that_holds_nothing_is_forgotten():
    shares = Shares()
    for i in range(1000):
        shares.add(str(i), 2)
        shares.add(str(i), -2)

    assert not shares._held


@given(st.lists(st.tuples(CLIENTS, st.integers(-3, 3).filter(bool)), max_size=100))
def test_no_client_below_its_share_is_refused_and_all_together_hold_at_most_twice_the_limit(moves):
    shares, held = Shares(), dict.fromkeys("abcd", 0)
    for client, wanted in moves:
        amount = max(wanted, -held[client])
        if amount > 0:
            active = {it for it, count in held.items() if count} | {client}
            below = held[client] + amount <= LIMIT // len(active)
            total = shares.total + amount
            allowed = total <= LIMIT or (below and total <= 2 * LIMIT)
            assert shares.allows(client, amount, LIMIT) == allowed
            amount *= allowed
        shares.add(client, amount)
        held[client] += amount
        assert shares.total == sum(held.values()) <= 2 * LIMIT
        assert shares._held == {it: count for it, count in held.items() if count}
