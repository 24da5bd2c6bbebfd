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


def test_flags_of_other_servers_are_those_that_the_command_line_understands(monkeypatch):
    row = Setting("length", ("max_model_len",), vllm="`--enable-auto-tool-choice` too")
    monkeypatch.setattr(peer_tables, "SETTINGS", (row,))

    cells = settings_table().splitlines()[-1].split(" | ")

    assert cells[1:4] == [
        "`--max-model-len`",
        "`--max-model-len`; `--enable-auto-tool-choice` too",
        "`--max-total-tokens`",
    ]


@pytest.mark.parametrize("name", ["--colour", "OLLAMA_COLOUR"])
def test_a_name_that_another_server_does_not_have_is_an_error(monkeypatch, name):
    monkeypatch.setattr(peer_tables, "SETTINGS", (Setting("x", ("port",), ollama=f"`{name}`"),))

    with pytest.raises(ValueError, match=f"Ollama has no {name}"):
        settings_table()


def test_a_route_that_the_service_answers_with_one_for_another_purpose_is_an_error(monkeypatch):
    row = Routes("health", "GET:/health", "GET:/is_sleeping", "GET:/props")
    monkeypatch.setattr(peer_tables, "ROUTES", (row,))

    with pytest.raises(ValueError, match=r"GET:/props is answered with: .* GET /info"):
        routes_table()


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
