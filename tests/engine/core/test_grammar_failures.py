"""Sequences that wait for their grammar: only a fault of the grammar is one."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from model.errors import GrammarError, ModelFolderError
from server.engine.core.grammar_queue import GrammarQueue


class Compiler:
    """Compiles with the results of a list; an exception is raised by the future, a class by the call itself."""

    def __init__(self, *results):
        self.results = list(results)

    def __call__(self, sampling):
        result = self.results.pop(0)
        if isinstance(result, type):
            raise result("can't start new thread")
        future = Future()
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
        return future


def outcome(compiler):
    """Return the matcher and the error of a sequence whose grammar is compiled."""
    queue = GrammarQueue(compiler)
    sequence = SimpleNamespace(
        request_id=1, client="a", sampling=SimpleNamespace(grammar="g"), matcher=None
    )
    queue.add(sequence)
    for _ in range(10):
        if ended := queue.take(wait=True):
            break
    assert not len(queue)
    assert not compiler.results
    ((same, error),) = ended
    assert same is sequence
    return sequence.matcher, error


def test_a_grammar_at_fault_ends_its_sequence_at_once():
    assert outcome(Compiler(GrammarError("it is nothing"))) == (
        None,
        "the grammar cannot be compiled: it is nothing",
    )


@pytest.mark.parametrize("failure", [MemoryError(), OSError(24, "files"), RuntimeError], ids=str)
def test_other_failures_are_tried_again(failure):
    assert outcome(Compiler(failure, failure, "matcher")) == ("matcher", None)


def test_failures_that_last_are_no_fault_of_the_grammar_and_reveal_nothing():
    error = ModelFolderError("/secret/tokenizer.json does not exist")

    assert outcome(Compiler(error, RuntimeError, error)) == (
        None,
        "the grammar cannot be compiled: an internal error",
    )


def test_a_sequence_that_is_removed_is_not_compiled_again():
    queue = GrammarQueue(Compiler(MemoryError()))
    queue.add(SimpleNamespace(request_id=7, client="a", sampling=SimpleNamespace(grammar="g")))

    assert queue.remove(7)
    assert queue.take(wait=False) == []
