"""The choice among replicas by the beginning of prompts."""

import json
from collections import Counter

import pytest

from server.ray.prefix_routing import KEY_CHARACTERS, MAX_LOAD, RecentRequests, ranked, routing_key

REPLICAS = [f"replica-{number}" for number in range(8)]


def idle(names=REPLICAS):
    return dict.fromkeys(names, 0)


@pytest.mark.parametrize("field", ["inputs", "prompt", "input"])
def test_the_key_is_the_beginning_of_the_prompt_of_any_route(field):
    body = json.dumps({"model": "x", field: "a" * 600}).encode()

    assert routing_key(body) == "a" * KEY_CHARACTERS


def test_conversations_with_the_same_beginning_have_the_same_key():
    system = {"role": "system", "content": "s" * 600}
    keys = {
        routing_key(json.dumps({"messages": [system, {"role": "user", "content": text}]}).encode())
        for text in ("one", "two")
    }

    assert len(keys) == 1
    assert len(keys.pop()) == KEY_CHARACTERS


def test_other_fields_do_not_change_the_key():
    one = routing_key(b'{"inputs": "x", "parameters": {"seed": 1}}')

    assert one == routing_key(b'{"parameters": {"seed": 2}, "inputs": "x"}') == "x"


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b"", ""),
        (b'{"inputs": "abc', '{"inputs": "abc'),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"[1, 2]", "[1, 2]"),
        (b'{"prompt": [1, 2, 3]}', "[1, 2, 3]"),
        (b'{"prompt": null, "n": 1}', '{"prompt": null, "n": 1}'),
        (b'{"inputs": "\\ud800"}', "\ud800"),
    ],
)
def test_any_body_has_a_key(body, key):
    assert routing_key(body) == key
    assert ranked(key, idle())


def test_a_key_goes_to_one_replica_and_keys_are_spread_evenly():
    first = Counter(ranked(f"prompt {number}", idle())[0] for number in range(4000))

    assert ranked("prompt", idle()) == ranked("prompt", idle(REPLICAS[::-1]))
    assert max(first.values()) < 1.2 * 500
    assert min(first.values()) > 0.8 * 500


def test_a_replica_that_ends_moves_only_its_own_keys():
    keys = [f"prompt {number}" for number in range(1000)]
    before = {key: ranked(key, idle())[0] for key in keys}
    after = {key: ranked(key, idle(REPLICAS[1:]))[0] for key in keys}

    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if before[key] == REPLICAS[0]}


def test_one_prefix_for_all_requests_fills_no_replica_beyond_the_bound():
    loads = idle()
    for _ in range(800):
        loads[ranked("the same", loads)[0]] += 1

    assert max(loads.values()) <= MAX_LOAD * 100 + 1


def test_a_request_without_a_key_goes_to_the_least_loaded_replica():
    assert ranked("", {"a": 3, "b": 1, "c": 2}) == ["b", "c", "a"]


def test_all_replicas_are_ranked_and_nothing_else():
    loads = {"a": 1000, "b": 0}

    assert sorted(ranked("x", loads)) == ["a", "b"]
    assert ranked("x", loads)[0] == "b"
    assert ranked("x", {}) == []


def test_a_request_counts_for_some_seconds():
    recent = RecentRequests(2)
    recent.add("a", 10.0)
    recent.add("a", 11.0)

    assert [recent.count("a", now) for now in (11.0, 12.0, 13.0)] == [2, 1, 0]
    assert recent.count("b", 11.0) == 0


def test_replicas_that_ended_are_forgotten():
    recent = RecentRequests(2)
    recent.add("a", 0.0)
    recent.add("b", 0.0)
    recent.keep({"b": None})

    assert (recent.count("a", 0.0), recent.count("b", 0.0)) == (0, 1)
