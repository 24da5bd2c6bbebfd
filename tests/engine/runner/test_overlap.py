"""Running one step ahead gives the same tokens as running steps one by one."""

import math
import random

import pytest
import torch

from model.sampling.parameters import SamplingParams
from server.engine.core.messages import AbortRequests
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.runner.step.model_runner import ModelRunner
from tests.engine.runner.step.test_recordings import Again
from tests.engine.runner.test_engine_model import (
    assert_all_free,
    greedy,
    make_engine,
    random_prompt,
    tokens,
)
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

SAMPLED = {"temperature": 1.2, "seed": 7}
SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    SAMPLED,
    SAMPLED | {"top_k": 9, "top_p": 0.8},
    SAMPLED | {"repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"temperature": 0.0, "presence_penalty": 0.9},
    {"temperature": 0.0, "prompt_logprobs": True},
    {"temperature": 0.0, "logit_bias": {3: 4.0, 5: -100.0}},
    {"temperature": 0.0, "bad_words": tuple((i,) for i in range(0, VOCAB_SIZE, 2))},
    SAMPLED | {"bad_words": tuple((i, j) for i in range(1, 64) for j in range(0, VOCAB_SIZE, 5))},
    {"temperature": 0.0, "min_new_tokens": 12, "eos_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 9))},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=[False, True], ids=["launched", "recorded"])
def ahead(request, checkpoint):
    """Return a function that makes engines that run ahead, with or without recordings."""

    def make(**changes):
        engine = make_engine(checkpoint, max_num_seqs=20, **changes)
        engine.engine._runs_ahead = True
        if request.param:
            runner = engine.engine._runner
            runner.record_steps(engine.engine._scheduler.config, Again())
            while runner.use_idle_time():
                pass
        return engine

    return make


def mixed_requests(count, seed=1, samplings=SAMPLINGS):
    rng = random.Random(seed)
    return [
        GenerateRequest(
            request_id=i,
            prompt_token_ids=random_prompt(rng, 1, 60),
            sampling=SamplingParams(
                max_new_tokens=rng.randint(1, 40), **samplings[i % len(samplings)]
            ),
        )
        for i in range(count)
    ]


def comparable(events):
    """Return the events without the last digits, which depend on the sequences of a step."""
    return [
        (
            event.token_id,
            event.finish_reason,
            None if event.logprob is None else pytest.approx(event.logprob, abs=1e-4),
            [token_id for token_id, _ in event.top_tokens],
        )
        for event in events
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids="+".join)
def test_all_sampling_parameters_give_the_same_events(checkpoint, ahead, sampling):
    requests = mixed_requests(12, samplings=[sampling])
    expected = make_engine(checkpoint, max_num_seqs=20).generate(requests)
    engine = ahead()

    assert engine.generate(requests) == expected
    assert_all_free(engine)


@pytest.mark.parametrize("tokens_of_cache", [4096, 128], ids=["no preemption", "preemption"])
@pytest.mark.parametrize("budget", [20, 64])
def test_mixed_traffic_gives_the_same_events(checkpoint, ahead, tokens_of_cache, budget):
    requests = mixed_requests(40)
    limits = {"kv_cache_tokens": tokens_of_cache, "max_num_batched_tokens": budget}
    expected = make_engine(checkpoint, max_num_seqs=20, **limits).generate(requests)
    engine = ahead(**limits)

    found = engine.generate(requests)

    assert [comparable(events) for events in found] == [comparable(events) for events in expected]
    assert (engine.engine.stats().num_preemptions > 0) == (tokens_of_cache == 128)
    assert_all_free(engine)


def test_a_chunk_of_one_token_does_not_shift_the_tokens_of_other_rows(checkpoint, ahead):
    budget, rng = 40, random.Random(3)
    prompts = [random_prompt(rng, budget - 1, budget - 1), random_prompt(rng, 20, 20)]
    requests = [greedy(i, prompt, 12) for i, prompt in enumerate(prompts)]
    plain = make_engine(checkpoint, max_num_batched_tokens=budget).generate(requests)

    found = ahead(max_num_batched_tokens=budget).generate(requests)

    assert [tokens(events) for events in found] == [tokens(events) for events in plain]


def test_a_step_is_launched_before_the_engine_waits_for_the_previous_one(ahead, monkeypatch):
    engine = ahead()
    order = []
    launch = ModelRunner.launch

    class Watched:
        def __init__(self, number, pending):
            self.number, self.pending, self.feeds_next = number, pending, pending.feeds_next
            self.sample = pending.sample

        def result(self):
            order.append(("wait", self.number))
            return self.pending.result()

    def watched(runner, output):
        order.append(("launch", output.step))
        return Watched(output.step, launch(runner, output))

    monkeypatch.setattr(ModelRunner, "launch", watched)
    engine.generate([greedy(1, [1, 2, 3], 4)])

    assert order == [
        ("launch", 0), ("launch", 1), ("wait", 0), ("launch", 2), ("wait", 1), ("launch", 3),
        ("wait", 2), ("wait", 3),
    ]  # fmt: skip


def test_a_sequence_aborted_in_flight_does_not_change_the_others(checkpoint, ahead):
    rng = random.Random(5)
    requests = [greedy(i, random_prompt(rng, 5, 30), 30) for i in range(6)]
    expected = [tokens(events) for events in make_engine(checkpoint).generate(requests)]
    engine = ahead()
    engine.channel.inbox += requests
    engine.engine.receive(wait=math.inf)
    for _ in range(5):
        engine.engine.step()

    engine.channel.inbox.append(AbortRequests([1, 4]))
    engine.engine.receive(wait=math.inf)
    while engine.engine.has_work:
        engine.engine.step()

    found = {i: [] for i in range(6)}
    for step in engine.channel.steps:
        for i, request_id in enumerate(step.request_ids):
            found[request_id].append(step.event(i).token_id)
    assert all(found[i] == expected[i] for i in (0, 2, 3, 5))
    assert all(found[i] == expected[i][: len(found[i])] for i in (1, 4))
    assert_all_free(engine)


def test_aborting_all_sequences_in_flight_leaves_no_state(ahead):
    engine = ahead()
    engine.channel.inbox += [greedy(1, [1, 2, 3], 30), greedy(2, [4], 30)]
    engine.engine.receive(wait=math.inf)
    engine.engine.step()
    engine.engine.step()

    engine.channel.inbox.append(AbortRequests([1, 2]))
    engine.engine.receive(wait=math.inf)
    assert engine.engine.has_work
    engine.engine.step()

    assert not engine.engine.has_work
    assert_all_free(engine)


def test_a_prompt_aborted_while_a_chunk_is_scored_leaves_no_log_probabilities(ahead):
    engine = ahead(max_num_batched_tokens=32)
    engine.channel.inbox.append(greedy(1, [1] * 200, 5, prompt_logprobs=True))
    engine.engine.receive(wait=math.inf)
    engine.engine.step()
    engine.engine.step()

    engine.channel.inbox.append(AbortRequests([1]))
    engine.engine.receive(wait=math.inf)
    engine.engine.step()

    assert not engine.engine.has_work
    assert not engine.engine._prompt_logprobs


def test_a_failed_launch_ends_its_sequences_after_their_tokens_in_flight(ahead, monkeypatch):
    engine = ahead()
    launch = ModelRunner.launch

    def broken(runner, output):
        if output.step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return launch(runner, output)

    monkeypatch.setattr(ModelRunner, "launch", broken)
    [events] = engine.generate([greedy(1, [1, 2, 3], 30)])

    assert [event.finish_reason for event in events] == [None] * 3 + [FinishReason.ERROR]
    assert_all_free(engine)
    assert len(engine.generate([greedy(2, [1, 2, 3], 5)])[0]) == 5


def test_failed_results_end_the_sequences_of_their_step(ahead, monkeypatch):
    engine = ahead()
    launch = ModelRunner.launch

    class Broken:
        feeds_next = True

        def sample(self):
            pass

        def result(self):
            raise RuntimeError("an illegal value")

    def broken(runner, output):
        pending = launch(runner, output)
        return Broken() if output.step == 2 else pending

    monkeypatch.setattr(ModelRunner, "launch", broken)
    [events] = engine.generate([greedy(1, [1, 2, 3], 30)])

    assert [event.finish_reason for event in events] == [None] * 2 + [FinishReason.ERROR]
    assert_all_free(engine)
