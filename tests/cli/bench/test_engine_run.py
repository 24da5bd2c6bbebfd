"""Traces of engine runs."""

import itertools
import math

import pytest

from model.sampling.parameters import SamplingParams
from server.cli.bench.engine.run import EngineRunError, _Channel, read_trace
from server.engine.core.messages import EngineStats, Shutdown, StepMessage
from server.engine.core.request import FinishReason, GenerateRequest


def step(*ids, ending=(), reason=FinishReason.LENGTH, errors=None):
    return StepMessage(
        request_ids=list(ids),
        token_ids=[5] * len(ids),
        finish_reasons=[int(reason) if i in ending else 0 for i in ids],
        stats=EngineStats(),
        errors=errors or {},
    )


def requests(*lengths):
    return [
        GenerateRequest(
            request_id=i, prompt_token_ids=[1], sampling=SamplingParams(max_new_tokens=length)
        )
        for i, length in enumerate(lengths, start=1)
    ]


def trace():
    """A trace of two requests; the second begins and ends a step later."""
    steps = [
        (10.5, step()),  # a chunk of a prompt has no token
        (11.0, step(1)),
        (12.0, step(1, 2)),
        (12.5, step(1, 2)),
        (13.0, step(1, 2, ending=[1])),
        (15.0, step(2, ending=[2])),
    ]
    return read_trace(10.0, steps, requests(4, 4))


def test_a_trace_lasts_from_sending_to_the_last_token():
    assert trace().seconds == 5.0


def test_decode_steps_give_every_request_a_token_after_its_first():
    assert (trace().decode_steps, trace().decode_seconds) == (2, 1.0)


def test_the_context_of_a_decode_includes_tokens_generated_before_it():
    assert trace().tokens_before == round(3 / 2)


def test_a_single_token_has_no_decode_steps():
    lone = read_trace(1.0, [(2.0, step(1, ending=[1]))], requests(1))

    assert (lone.seconds, lone.decode_steps) == (1.0, 0)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([step(1, ending=[1])], "1 tokens are missing"),
        ([step(1), step(1, ending=[1], reason=FinishReason.EOS)], "EOS"),
        ([step(1, ending=[1], reason=FinishReason.ERROR, errors={0: "too long"})], "too long"),
    ],
)
def test_a_request_without_all_its_tokens_is_an_error(steps, words):
    with pytest.raises(EngineRunError, match=words):
        read_trace(0.0, [(1.0, s) for s in steps], requests(2))


def messages_when_idle(channel, most=50):
    """What an engine receives that has no work but preparatory work without end, up to the end of its loop."""
    channel.receive(wait=0.02)
    received = []
    while not received and most:
        received, most = channel.receive(wait=0), most - 1
    return received


def test_preparatory_work_ends_after_the_idle_time(monkeypatch):
    clock = itertools.count(step=0.1)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))

    channel = _Channel(0.35)

    assert messages_when_idle(channel) == [Shutdown()]
    assert next(clock) == pytest.approx(0.5)
    assert messages_when_idle(channel) == [Shutdown()]  # the next time has as much


def test_preparatory_work_is_completed_by_default():
    channel = _Channel()

    assert not messages_when_idle(channel)
    assert channel.receive(wait=math.inf) == [Shutdown()]


def test_requests_are_not_limited_by_the_idle_time():
    channel = _Channel(0.0)
    channel.receive(wait=0.02)
    channel.inbox += requests(1)

    assert len(channel.receive(wait=0)) == 1
    assert not channel.receive(wait=0)
