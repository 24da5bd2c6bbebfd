"""What clients have in progress in several processes."""

import array
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.http.metrics import client_counts
from server.http.metrics.client_counts import NUM_CELLS, ClientCounts, Counts


def processes(count):
    rows = [memoryview(array.array("d", bytes(8 * NUM_CELLS))) for _ in range(count)]
    return [ClientCounts(row, [other for other in rows if other is not row]) for row in rows], rows


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcde"), st.integers(1, 3))),
)
def test_every_process_sees_the_sums_of_all(count, moves):
    found, rows = processes(count)
    held = Counter()
    for process, client, places in moves:
        at = process % count
        change = -held[at, client] if held[at, client] > 4 else places
        found[at].add(client, Counts(places=change, tokens=10 * change))
        held[at, client] += change
        for own in found:
            for name in "abcde":
                total = sum(held[i, name] for i in range(count))
                assert own.of(name) == Counts(places=total, tokens=10 * total)
            active = {name for (_, name), n in held.items() if n}
            assert own.num_clients("a") == len(active | {"a"})
    assert [int(row[0]) for row in rows] == [len(it._counts) if count > 1 else 0 for it in found]


def test_clients_beyond_the_capacity_of_a_row_are_counted_by_their_own_process(monkeypatch):
    monkeypatch.setattr(client_counts, "CAPACITY", 2)
    (one, other), _ = processes(2)
    for client in "abc":
        one.add(client, Counts(places=1))

    assert one.of("c").places == 1
    assert (other.of("a").places, other.of("c").places) == (1, 0)
    for client in "cab":
        one.add(client, Counts(places=-1))
    assert other.num_clients("x") == 1


def test_what_an_earlier_process_with_the_row_had_is_forgotten():
    (one, other), rows = processes(2)
    one.add("a", Counts(places=5))

    ClientCounts(rows[0], [rows[1]])

    assert other.of("a") == Counts()
