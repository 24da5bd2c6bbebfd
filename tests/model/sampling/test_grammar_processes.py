"""Grammars that are followed in other processes: the same states and masks, and what happens when a process ends."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from model.errors import GrammarError
from model.hub.resolve import resolve
from model.sampling.followed_matcher import MatcherRules
from model.sampling.grammar import (
    compile_matcher,
    serialize,
)
from model.sampling.grammar_process import Setup
from model.sampling.grammar_processes import GrammarProcesses, ProcessLostError
from model.sampling.token_masker import TokenMasker
from tests.waiting import GIVE_UP

RULES = MatcherRules(ends_from=0, most_tokens=60, follows_forced=True)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMAR = serialize("json_schema", SCHEMA)


@pytest.fixture
def processes():
    setup = Setup(str(resolve("bundled")), 4096, (0,), 128)
    found = GrammarProcesses(setup, num_processes=2, num_slots=6)
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_grammars_of_a_process_that_is_killed_or_stopped_are_followed_by_another(
    processes, vocabulary, number
):
    remote = [new(processes) for _ in range(16)]
    local = compile_matcher(vocabulary, GRAMMAR).copy(RULES)
    masker = TokenMasker(vocabulary)
    processes.compute(remote[:6])
    masker.compute([local])
    for step in range(3):
        token_id = allowed_ids(local_mask(masker, local))[step]
        if step == 1:
            hit = remote[0].worker
            assert any(matcher.worker is not hit for matcher in remote)
            os.kill(hit._process.pid, number)
        processes.advance([(matcher, token_id) for matcher in remote[:6]])
        masker.advance([(local, token_id)])
        for matcher in remote[:6]:
            assert not matcher.error
            assert (matcher.ahead, matcher.num_tokens) == (local.ahead, local.num_tokens)
            assert np.array_equal(processes.words[matcher.slot], local_mask(masker, local))
        for matcher in (local, *remote[:6]):
            for accepted in list(matcher.ahead):
                assert matcher.accept(accepted)
    assert all(matcher.worker is not hit for matcher in remote[:6])

    # Those that took no part in the step are found to be lost when they are needed.
    late = next(matcher for matcher in remote[6:] if matcher.worker is hit)
    assert late.forced_tokens() == new(processes).forced_tokens()
    assert not late.error
    assert late.copy().worker is late.worker is not hit


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def local_mask(masker, matcher):
    return masker.masks.words[matcher.slot]


def test_a_grammar_is_compiled_although_the_processes_are_killed(processes):
    for _ in range(3):
        for worker in processes._workers:
            os.kill(worker._process.pid, signal.SIGKILL)
        assert not new(processes).error


def test_a_stopped_process_that_compiles_is_given_up(processes):
    for worker in processes._workers:
        os.kill(worker._process.pid, signal.SIGSTOP)

    assert not new(processes).error


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("subprocess.Popen", BlockingIOError(11, "Resource temporarily unavailable")),
        ("socket.socketpair", OSError(24, "Too many open files")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
    ids=["process", "descriptors", "thread"],
)
def test_a_process_that_cannot_be_replaced_leaves_the_others_and_nothing_open(
    processes, monkeypatch, name, error
):
    matchers = [new(processes) for _ in range(16)]
    ended = matchers[0].worker
    ended.end()
    ended._process.wait(60)
    while ended._orders.fileno() >= 0:
        time.sleep(0.01)

    def refuse(*_, **__):
        raise error

    before = num_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(f"model.sampling.grammar_processes.{name}", refuse)
        assert new(processes).worker is not ended
        assert num_descriptors() == before
        (other,) = [worker for worker in processes._workers if not worker.has_ended]
        other.end()
        with pytest.raises(ProcessLostError):
            new(processes)
    assert not new(processes).error


def test_the_processes_end_with_their_connections(processes):
    matcher = new(processes)
    matcher.worker._steps.close()

    assert matcher.worker._process.wait(GIVE_UP) is not None
