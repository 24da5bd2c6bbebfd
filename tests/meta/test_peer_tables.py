"""The tables of docs/coming-from.md agree with the code."""

import pytest

from docs import peer_tables
from docs.peer_tables import Metric, Routes, Setting, metrics_table, routes_table, settings_table


def test_a_metric_of_another_server_that_is_not_listed_is_an_error(monkeypatch):
    monkeypatch.setattr(peer_tables, "METRICS", peer_tables.METRICS[1:])

    with pytest.raises(ValueError, match="metrics of vllm: vllm:num_requests_running"):
        metrics_table()


def test_a_metric_that_is_listed_twice_is_an_error(monkeypatch):
    monkeypatch.setattr(peer_tables, "METRICS", peer_tables.METRICS + peer_tables.METRICS[:1])

    with pytest.raises(ValueError, match="metrics of vllm: listed twice"):
        metrics_table()


def test_a_metric_that_does_not_exist_is_an_error(monkeypatch):
    row = Metric("sequences", "tessera_sequences_everywhere")
    monkeypatch.setattr(peer_tables, "METRICS", (*peer_tables.METRICS, row))

    with pytest.raises(ValueError, match="no metric tessera_sequences_everywhere"):
        metrics_table()


def test_a_setting_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setattr(peer_tables, "SETTINGS", (Setting("colour", ("colour",)),))

    with pytest.raises(ValueError, match="no setting colour"):
        settings_table()


def test_a_route_is_marked_if_it_is_served_with_the_same_body(monkeypatch):
    row = Routes("x", "GET:/info", "GET:/info POST:/info", "POST:/tokenize!")
    monkeypatch.setattr(peer_tables, "ROUTES", (row,))

    cells = routes_table().splitlines()[-1].split(" | ")

    assert cells[1:4] == [
        "`GET /info`",
        "`GET /info` ✓, `POST /info`",
        "`POST /tokenize` (other body)",
    ]


def test_a_route_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setattr(peer_tables, "ROUTES", (Routes("x", "GET:/nowhere"),))

    with pytest.raises(ValueError, match="no route GET:/nowhere"):
        routes_table()
