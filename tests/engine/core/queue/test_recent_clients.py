from server.engine.core.queue import recent_clients as module
from server.engine.core.queue.recent_clients import RECENT_SECONDS, RecentClients


def test_a_client_has_no_other_until_one_sends_a_request():
    recent = RecentClients()
    assert not recent.has_other("a", 0.0)
    recent.note("a", 0.0)
    assert not recent.has_other("a", 0.0)
    recent.note("b", 1.0)
    assert recent.has_other("a", 1.0)
    assert recent.has_other("b", 1.0)


def test_a_client_counts_up_to_a_minute_after_its_latest_request_whatever_was_sent_since():
    recent = RecentClients()
    recent.note("b", 0.0)
    recent.note("b", 5.0)
    for second in range(5, 100):
        recent.note("a", float(second))
    assert recent.has_other("a", 5.0 + RECENT_SECONDS)
    assert not recent.has_other("a", 5.1 + RECENT_SECONDS)


def test_of_very_many_clients_the_latest_are_kept(monkeypatch):
    monkeypatch.setattr(module, "_MOST_KEPT", 3)
    recent = RecentClients()
    for number in range(10):
        recent.note(str(number), float(number))
    assert len(recent) == 3
    assert recent.has_other("9", 9.0)
