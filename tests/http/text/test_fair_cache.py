"""A cache of which no client can displace more than its share."""

from hypothesis import given
from hypothesis import strategies as st

from server.http.text.fair_cache import FairCache


def key(client, number):
    return f"{client}/{number}".encode()


def test_a_client_with_many_values_displaces_only_its_own():
    cache = FairCache(8)
    for number in range(3):
        cache.put(key("b", number), number, "b")

    for number in range(1000):
        cache.put(key("a", number), number, "a")

    assert [cache.get(key("b", number)) for number in range(3)] == [0, 1, 2]
    assert [cache.get(key("a", number)) for number in range(995, 1000)] == [*range(995, 1000)]
    assert len(cache) == 8


def test_a_client_alone_has_all_the_room_and_loses_what_it_used_longest_ago():
    cache = FairCache(3)
    for number in range(3):
        cache.put(key("a", number), number, "a")
    assert cache.get(key("a", 0)) == 0

    cache.put(key("a", 3), 3, "a")

    assert [cache.get(key("a", number)) for number in range(4)] == [0, None, 2, 3]


def test_values_are_found_by_all_and_stay_with_the_first():
    cache = FairCache(2)
    cache.put(b"x", 1, "a")
    cache.put(b"x", 2, "b")
    cache.put(b"y", 3, "b")

    cache.put(b"z", 4, "b")

    assert [cache.get(name) for name in (b"x", b"y", b"z")] == [1, None, 4]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 40)), max_size=200))
def test_no_client_loses_a_value_while_it_has_less_than_its_share(puts):
    most = 12
    cache = FairCache(most)
    kept: dict[str, set[bytes]] = {}
    for client, number in puts:
        name = key(client, number)
        cache.put(name, number, client)
        kept.setdefault(client, set()).add(name)
        found = {it: {k for k in names if k in cache._values} for it, names in kept.items()}
        share = most // len(kept)
        for it, names in kept.items():
            lost = names - found[it]
            assert not lost or len(found[it]) >= share
        kept = found
        assert len(cache) <= most
