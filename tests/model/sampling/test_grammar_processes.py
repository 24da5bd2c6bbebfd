"""Grammars that are followed in other processes: the same states and masks, and what happens when a process ends."""

import json
import os
import signal
import time

import numpy as np
import pytest

from model.errors import GrammarError
from model.hub.resolve import resolve
from model.sampling import grammar_processes
from model.sampling.followed_matcher import MatcherRules
from model.sampling.grammar import (
    compile_matcher,
    serialize,
)
from model.sampling.grammar_process import Setup
from model.sampling.grammar_processes import FAILURE, GrammarProcesses
from model.sampling.token_masker import TokenMasker
from tests.waiting import GIVE_UP

RULES = MatcherRules(ends_from=0, most_tokens=60, follows_forced=True)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SETUP = Setup(str(resolve("bundled")), 4096, (0,), 128)
GRAMMAR = serialize("json_schema", SCHEMA)


@pytest.fixture
def processes():
    found = GrammarProcesses(SETUP, num_processes=2, num_slots=6)
    yield found
    found.close()


def new(processes, grammar=GRAMMAR, rules=RULES):
    return processes.compile(grammar, rules).result(60)


def allowed_ids(words):
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def test_states_masks_and_outputs_are_those_of_one_process(processes, vocabulary, tokenizer):
    remote = [new(processes) for _ in range(4)]
    base = compile_matcher(vocabulary, GRAMMAR)
    local = [base.copy(RULES) for _ in remote]
    masker = TokenMasker(vocabulary)
    rng = np.random.default_rng(3)
    texts = {}
    ids = {i: [] for i in range(4)}
    going_on = list(range(4))
    for _ in range(60):
        processes.compute([remote[i] for i in going_on])
        masker.compute([local[i] for i in going_on])
        chosen = {}
        for i in going_on:
            words = masker.masks.words[local[i].slot]
            assert np.array_equal(processes.words[remote[i].slot], words)
            chosen[i] = int(rng.choice(allowed_ids(words)))
        processes.advance([(remote[i], chosen[i]) for i in going_on])
        masker.advance([(local[i], chosen[i]) for i in going_on])
        for i in going_on:
            assert remote[i].ahead == local[i].ahead
            assert remote[i].has_stopped == local[i].has_stopped
            ids[i] += remote[i].ahead
            for token_id in remote[i].ahead.copy():
                assert remote[i].accept(token_id)
                assert local[i].accept(token_id)
            if remote[i].is_complete:
                assert local[i].is_complete
                texts[i] = tokenizer.decode(ids[i])
        going_on = [i for i in going_on if i not in texts]

    assert len({matcher.worker for matcher in remote}) >= 1
    for text in texts.values():
        assert set(json.loads(text)) == {"name", "age"}


def test_many_matchers_of_one_grammar_are_divided_among_the_processes(processes):
    matchers = [new(processes) for _ in range(20)]

    counts = [worker.num_matchers for worker in {matcher.worker for matcher in matchers}]
    assert sorted(counts)[0] >= 6
    assert sum(counts) == 20
    del matchers
    assert new(processes).worker.num_matchers < 6


def test_a_matcher_without_a_slot_gets_that_of_one_that_is_not_needed(processes):
    matchers = [new(processes) for _ in range(9)]
    processes.compute(matchers[:5])
    first = processes.words[matchers[0].slot].copy()
    processes.compute(matchers[5:])
    assert sum(matcher.is_masked for matcher in matchers) == 6

    processes.compute(matchers[:5])

    assert all(matcher.is_masked for matcher in matchers[:5])
    for matcher in matchers[:5]:
        assert np.array_equal(processes.words[matcher.slot], first)


def test_single_tokens_copies_and_forced_tokens_need_no_step(processes, tokenizer):
    matcher = new(processes)
    forced = matcher.forced_tokens()
    assert tokenizer.decode(forced) == '{"name":'
    for token_id in forced:
        assert matcher.accept(token_id)
    copy = matcher.copy()
    (x,) = tokenizer.encode("x", add_special_tokens=False)

    assert not copy.accept(x)
    assert "cannot be followed" in copy.error
    assert matcher.error == ""
    assert not matcher.is_complete


def test_a_grammar_that_cannot_be_compiled_is_an_error_and_others_go_on(processes):
    with pytest.raises(GrammarError, match="regex"):
        new(processes, serialize("regex", "(?=a)"))

    assert not new(processes).error


def test_a_process_that_is_killed_fails_its_matchers_and_is_replaced(processes):
    matchers = [new(processes) for _ in range(16)]
    processes.compute(matchers[:3])
    killed = matchers[0].worker
    os.kill(killed._process.pid, signal.SIGKILL)
    lost = [matcher for matcher in matchers[:6] if matcher.worker is killed]

    processes.advance([(matcher, 96) for matcher in lost])

    for matcher in lost:
        assert not matcher.continues_after(96)
        assert not matcher.accept(96)
        assert matcher.error == "the grammar cannot be followed: an internal error"
    deadline = time.monotonic() + 10
    while not killed.has_ended and time.monotonic() < deadline:
        time.sleep(0.01)
    again = [new(processes) for _ in range(8)]
    assert all(matcher.worker is not killed for matcher in again)
    processes.compute(again[:2])
    assert all(not matcher.has_failed for matcher in again)


def test_a_process_that_is_stopped_fails_what_it_should_compile_and_is_replaced(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(grammar_processes, "_ORDER_SECONDS", 0.2)
        processes = GrammarProcesses(SETUP, num_processes=1, num_slots=6)
    (stopped,) = processes._workers
    os.kill(stopped._process.pid, signal.SIGSTOP)

    with pytest.raises(GrammarError, match=FAILURE):
        new(processes)

    assert stopped.has_ended
    assert new(processes)
    processes.close()


def test_the_processes_end_with_their_connections(processes):
    matcher = new(processes)
    matcher.worker._steps.close()

    assert matcher.worker._process.wait(GIVE_UP) is not None
