"""Changes of adapters are decided in one order, and a front end that starts later gets what they left."""

from hypothesis import given
from hypothesis import strategies as st

from server.engine.core.request import AdapterRef
from server.engine.link.front_end import adapter_names
from server.engine.link.front_end.adapter_names import AdapterNames
from server.engine.link.protocol import AdapterChange, AdapterRefusal

AT_START = ("a", "b")


def change(name, digest):
    """Return the load of an adapter, or its unloading if `digest` is None."""
    return AdapterChange(name, digest and AdapterRef(name, f"/{name}", digest))


def apply(adapters, changes):
    for it in changes:
        adapters.pop(it.name, None)
        if it.adapter is not None:
            adapters[it.name] = it.adapter.digest
    return adapters


CHANGES = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from([None, "1", "2"]), st.booleans()),
    max_size=20,
)


@given(CHANGES)
def test_a_front_end_that_starts_later_has_the_adapters_of_the_others(changes):
    names, table = AdapterNames(AT_START), dict.fromkeys(AT_START, "0")
    for name, digest, replaces in changes:
        proposed = change(name, digest)
        refusal = names.decide(proposed, replaces=replaces)
        if digest is None:
            assert refusal is (None if name in table else AdapterRefusal.UNKNOWN)
        else:
            assert refusal is (AdapterRefusal.TAKEN if name in table and not replaces else None)
        if refusal is None:
            apply(table, [proposed])

    late = apply(dict.fromkeys(AT_START, "0"), names.changes())
    assert list(late.items()) == list(table.items())


def test_names_that_were_unloaded_take_no_memory():
    names = AdapterNames(AT_START)
    for number in range(1000):
        names.decide(change(str(number), "1"), replaces=False)
        names.decide(change(str(number), None), replaces=False)
    assert names.changes() == []


def test_there_is_a_most_number_of_adapters(monkeypatch):
    monkeypatch.setattr(adapter_names, "MAX_ADAPTERS", 3)
    names = AdapterNames(AT_START)
    assert names.decide(change("c", "1"), replaces=False) is None
    assert names.decide(change("d", "1"), replaces=True) is AdapterRefusal.FULL
    assert names.decide(change("c", "2"), replaces=True) is None
    assert names.decide(change("a", None), replaces=False) is None
    assert names.decide(change("d", "1"), replaces=False) is None
