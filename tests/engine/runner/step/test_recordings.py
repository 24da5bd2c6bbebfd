"""Recorded steps give the tokens of steps without recordings, also with preemptions, prefix hits and chunks."""

import logging
import math
import random

import pytest

from benchmarks.local_engine import LocalEngine
from server.engine.core.messages import Shutdown
from server.engine.runner.step.buckets import recorded_bytes, row_counts, token_counts
from tests.engine.runner.test_engine_model import (
    assert_all_free,
    greedy,
    make_engine,
    random_prompt,
    tokens,
)
from tests.tiny_checkpoint import write_tiny_checkpoint


class Again:
    """A recorder for the CPU: a replay poisons the results of the last one, then computes on the same memory."""

    def __init__(self):
        self.runs = 0

    def record(self, compute):
        results = compute()

        def run():
            self.runs += 1
            for result in (results.logits, results.tokens, results.logprobs):
                result.fill_(float("nan") if result.is_floating_point() else -7)
            compute()

        return run


class Broken:
    def record(self, compute):
        raise RuntimeError("operation not permitted when stream is capturing")


class Refusing(Again):
    """Refuses cooperative launches: the recording of the first step, or its first replay."""

    def __init__(self, *, recording):
        super().__init__()
        self.refusals = 0
        self._recording = recording

    def record(self, compute):
        if self._recording:
            self._refuse()
        run = super().record(compute)

        def refused_first():
            if not self._recording:
                self._refuse()
            run()

        return refused_first

    def _refuse(self):
        self.refusals += 1
        if self.refusals == 1:
            raise RuntimeError("CUDA error: too many blocks in cooperative launch")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def recording_engine(checkpoint, recorder, *, ahead=100, **changes) -> LocalEngine:
    engine = make_engine(checkpoint, max_num_seqs=20, **changes)
    runner = engine.engine._runner
    runner.record_steps(engine.engine._scheduler.config, recorder)
    for _ in range(ahead):
        runner.use_idle_time()
    return engine


def answers(engine, prompts, **sampling):
    requests = [greedy(i, prompt, 30 + i, **sampling) for i, prompt in enumerate(prompts)]
    return [tokens(events) for events in engine.generate(requests)]


def test_tokens_are_those_of_steps_without_recordings(checkpoint):
    rng = random.Random(1)
    prompts = [random_prompt(rng, 1, 60) for _ in range(19)]
    recorder = Again()
    expected = answers(make_engine(checkpoint, max_num_seqs=20), prompts)

    engine = recording_engine(checkpoint, recorder)

    assert answers(engine, prompts) == expected
    assert recorder.runs > 20
    assert_all_free(engine)


def test_log_probabilities_of_argmax_tokens_need_no_sampler(checkpoint, monkeypatch):
    prompts = [[5, 6, 7, 8], [9], [10, 11]]

    def found(engine):
        requests = [greedy(i, prompt, 20, logprobs=i != 1) for i, prompt in enumerate(prompts)]
        return [
            [(event.token_id, event.logprob) for event in events]
            for events in engine.generate(requests)
        ]

    expected = found(make_engine(checkpoint))
    engine = recording_engine(checkpoint, Again())
    # Sampling row by row would give the same tokens, but more slowly.
    monkeypatch.setattr(engine.engine._runner, "_sampler", None)

    assert found(engine) == expected
    assert [all(p is None for _, p in events) for events in expected] == [False, True, False]


def test_recordings_use_the_new_blocks_of_preempted_sequences(checkpoint):
    rng = random.Random(2)
    prompts = [random_prompt(rng, 20, 40) for _ in range(8)]
    expected = answers(make_engine(checkpoint, max_num_seqs=20), prompts)
    recorder = Again()

    engine = recording_engine(checkpoint, recorder, kv_cache_tokens=272)

    assert answers(engine, prompts) == expected
    assert engine.engine.stats().num_preemptions > 0
    assert recorder.runs > 20


def test_a_step_without_a_recording_gets_one_after_some_time(checkpoint):
    recorder = Again()
    engine = recording_engine(checkpoint, recorder, ahead=0)
    expected = answers(make_engine(checkpoint), [[1, 2, 3]])

    assert answers(engine, [[1, 2, 3]]) == expected
    assert 20 < recorder.runs < 29
    before = recorder.runs
    assert answers(engine, [[1, 2, 3]]) == expected
    assert recorder.runs - before == 29


def test_recordings_are_made_before_the_engine_waits_for_requests(checkpoint, monkeypatch):
    engine = recording_engine(checkpoint, Again(), ahead=0)
    asked = []

    def receive(*, wait):
        asked.append(wait)
        return [Shutdown()] if math.isinf(wait) else []

    monkeypatch.setattr(engine.channel, "receive", receive)
    engine.engine.run()

    made = engine.engine._runner.recorded.recorded
    decode = [bucket for bucket in made if not bucket.prompt_seqs]
    prefill = [bucket for bucket in made if bucket.prompt_seqs]
    assert [bucket.rows for bucket in decode] == row_counts(20)
    alone = [bucket.prompt_tokens for bucket in prefill if bucket.prompt_seqs == 1]
    assert alone == token_counts(256)
    assert {bucket.prompt_seqs for bucket in prefill if not bucket.rows} == {1, 8}
    assert {bucket.rows for bucket in prefill} == {0, 16, 20}
    idle, *between, check, last = asked
    assert 0 < idle < 1
    assert between == [0] * (len(made) + 1)
    assert check == 1.0  # then the engine checks its bookkeeping
    assert last == math.inf


def test_nothing_is_recorded_between_requests_in_quick_succession(checkpoint, monkeypatch):
    engine = recording_engine(checkpoint, Again(), ahead=0)
    messages = [greedy(1, [1, 2, 3], 2), greedy(2, [4], 2), Shutdown()]

    def receive(*, wait):
        return [messages.pop(0)] if wait else []

    monkeypatch.setattr(engine.channel, "receive", receive)
    engine.engine.run()

    assert not messages
    assert sum(bool(reason) for s in engine.channel.steps for reason in s.finish_reasons) == 2
    made = engine.engine._runner.recorded.recorded
    assert not [bucket for bucket in made if bucket.prompt_seqs]


def test_log_probabilities_of_a_prompt_are_computed_without_a_recording(checkpoint):
    prompts = [[5, 6, 7, 8], [9]]
    plain = make_engine(checkpoint)
    engine = recording_engine(checkpoint, Again())
    expected = answers(plain, prompts, prompt_logprobs=True)

    assert answers(engine, prompts, prompt_logprobs=True) == expected


def test_a_step_that_cannot_be_recorded_is_launched_and_logged_once(checkpoint, caplog):
    with caplog.at_level(logging.WARNING, "tessera.engine"):
        engine = recording_engine(checkpoint, Broken())
        found = answers(engine, [[1, 2, 3], [4, 5]])

    assert found == answers(make_engine(checkpoint), [[1, 2, 3], [4, 5]])
    reason = "failed: operation not permitted when stream is capturing"
    assert [r.getMessage() for r in caplog.records if "recorded" in r.getMessage()] == [
        "no more steps are recorded: Bucket(rows=1, queries=1, prompt_tokens=0, prompt_seqs=0, columns=32, "
        "num_logits=1, shared_blocks=0, deterministic=False, chained=False, has_states=False, extra_columns=(), "
        f"want=<Want.TOKENS: 'tokens'>, top=0) {reason}",
    ]


def test_the_memory_of_inputs_and_results_is_known_before_the_recordings_are_made(checkpoint):
    engine = recording_engine(checkpoint, Again())
    runner, limits = engine.engine._runner, engine.engine._scheduler.config
    while runner.use_idle_time():
        pass
    recorded = runner.recorded
    sizes = [
        sum(array.nbytes for array in vars(made.step.input.host).values())
        for made in recorded._recordings.values()
    ]
    logits = recorded._decode_out.logits.nbytes + recorded._prompt_out.logits.nbytes

    found = recorded_bytes(limits, 8, logits // (limits.max_logits + limits.max_num_seqs))

    assert found == logits + sum(sizes)


@pytest.mark.parametrize("recording", [True, False], ids=["recording", "replay"])
def test_a_single_launch_that_the_driver_refuses_late_is_replaced(checkpoint, recording, caplog):
    prompts = [[1, 2, 3], [4, 5]]
    expected = answers(make_engine(checkpoint), prompts)
    recorder = Refusing(recording=recording)
    engine = recording_engine(checkpoint, recorder)
    runner = engine.engine._runner
    ahead = runner.recorded.recorded

    assert answers(engine, prompts) == expected

    assert engine.engine.stats().num_failed_steps == 0
    assert "the driver refuses the launch" in runner.describe_plan().one_sequence
    assert caplog.text.count("is not a single launch") == 1
    while runner.use_idle_time():
        pass
    assert {*ahead} <= {*runner.recorded.recorded}
    assert answers(engine, prompts) == expected
    assert_all_free(engine)


def test_a_second_refusal_is_an_error(checkpoint):
    model = make_engine(checkpoint).engine._runner.model
    error = RuntimeError("CUDA error: too many blocks in cooperative launch")

    assert model.executors.replaces_single_launch(error)
    assert not model.executors.replaces_single_launch(error)
    assert not model.executors.replaces_single_launch(RuntimeError("CUDA error: out of memory"))


@pytest.mark.parametrize("budget", [20, 64])
def test_chunks_prefix_hits_and_many_prompts_give_the_tokens_of_steps_without_recordings(
    checkpoint, budget
):
    rng = random.Random(3)
    common = random_prompt(rng, 40, 40)
    prompts = [common + random_prompt(rng, 1, 40) for _ in range(12)] + [common[:9]]
    limits = {"max_num_batched_tokens": budget}
    expected = answers(make_engine(checkpoint, max_num_seqs=20, **limits), prompts)
    recorder = Again()
    engine = recording_engine(checkpoint, recorder, **limits)
    while engine.engine._runner.use_idle_time():
        pass

    for _ in range(3):  # records the missed steps in between
        assert answers(engine, prompts) == expected
        while engine.engine._runner.use_idle_time():
            pass
    before = recorder.runs
    assert answers(engine, prompts) == expected

    assert engine.engine.stats().prefix_cache_hit_tokens > 0
    assert recorder.runs - before > 30
    assert_all_free(engine)
