"""Sequences that wait for their grammar: clients take turns, whoever asked first."""

from concurrent.futures import Future

import pytest

from server.engine.core import grammar_queue
from server.engine.core.grammar_queue import GrammarQueue
from tests.engine.core.bookkeeping import make_sequence


class Compiler:
    """Notes which grammars are compiled; they end when their futures are set."""

    def __init__(self):
        self.started = []
        self.futures = {}

    def __call__(self, sampling):
        self.started.append(sampling.grammar)
        self.futures[sampling.grammar] = future = Future()
        return future

    def end(self, grammar):
        self.futures[grammar].set_result(None)


@pytest.fixture
def compiler():
    return Compiler()


@pytest.fixture
def waiting(compiler, monkeypatch):
    monkeypatch.setattr(grammar_queue, "_MOST_STARTED", 2)
    return GrammarQueue(compiler)


def add(queue, request_id, client):
    queue.add(make_sequence(request_id, 3, grammar=f"{client}{request_id}", client=client))


def test_a_client_waits_for_one_grammar_of_each_other_one(waiting, compiler):
    for i in range(6):
        add(waiting, i, "a")
    add(waiting, 6, "b")
    assert compiler.started == ["a0", "a1"]

    compiler.end("a0")
    compiler.end("a1")
    ended = waiting.take(wait=False)

    assert [sequence.request_id for sequence, _ in ended] == [0, 1]
    assert compiler.started == ["a0", "a1", "a2", "b6"]
    assert len(waiting) == 5


def test_a_sequence_that_is_dropped_is_not_compiled_and_one_that_was_started_makes_way(
    waiting, compiler
):
    for i in range(4):
        add(waiting, i, "a")

    assert waiting.remove(2)
    assert waiting.remove(0)
    assert not waiting.remove(0)

    assert compiler.started == ["a0", "a1", "a3"]
    assert len(waiting) == 2
