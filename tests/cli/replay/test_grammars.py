"""Grammars of receipts are compiled first in a process with limits."""

import json

import pytest

from model.hub.names import BUNDLED_FOLDER
from model.sampling.grammar import serialize
from server.cli.replay import grammars
from server.cli.replay.work import tasks_of
from server.http.text.grammar_compiler import GrammarCompiler, Verdict
from tests.receipts.make import make_receipt

GOOD = serialize("regex", "[a-z]{3,9}")
COSTLY = serialize("regex", "(((x{1000}){1000}){1000}){1000}")
DEEP = json.dumps({"grammars": [{"json_schema": {"x": 1}}]}).replace(
    '{"x": 1}', "[" * 5000 + "]" * 5000
)


def check(*texts):
    tasks = [task for text in texts for task in tasks_of("x", make_receipt(grammar=text))]
    kept = grammars.without_refused(tasks, str(BUNDLED_FOLDER), 4096, (0,))
    return [task in kept for task in tasks], [task.computed.error for task in tasks]


def test_a_grammar_that_is_refused_is_not_given_to_the_engine():
    kept, errors = check(GOOD, None, "no grammar", DEEP, COSTLY, GOOD)

    assert kept == [True, True, False, False, False, True]
    assert [error for error, keep in zip(errors, kept, strict=True) if keep] == [None] * 3
    for error in (errors[2], errors[3], errors[4]):
        assert error.startswith("the grammar cannot be compiled: ")


def test_a_grammar_larger_than_a_service_takes_is_refused():
    kept, (error,) = check("x" * (9 << 20))

    assert kept == [False]
    assert error == "the grammar cannot be compiled: must have at most 8388608 bytes"


def test_outputs_without_a_grammar_start_no_process(monkeypatch):
    monkeypatch.setattr(grammars, "GrammarCompiler", None)

    assert check(None, None)[0] == [True, True]


def test_each_grammar_is_checked_once(monkeypatch):
    asked = []

    async def check_here(_self, constraint, _vocab_size):
        asked.append(constraint.value)
        return Verdict(grammar=constraint.value)

    monkeypatch.setattr(GrammarCompiler, "check", check_here)

    check(GOOD, GOOD, GOOD)

    assert asked == [GOOD]


@pytest.mark.parametrize("error", ["overloaded", "unavailable"])
def test_a_check_that_cannot_be_made_is_an_error_of_the_output(monkeypatch, error):
    async def fail(*_args):
        kinds = {"overloaded": grammars.OverloadedError, "unavailable": grammars.UnavailableError}
        raise kinds[error]("the machine is busy")

    monkeypatch.setattr(GrammarCompiler, "check", fail)

    assert "the machine is busy" in check(GOOD)[1][0]
