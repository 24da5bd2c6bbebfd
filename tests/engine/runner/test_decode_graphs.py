"""Decode steps from recordings: the tokens of steps without them, whatever comes, goes and is preempted."""

import itertools
import logging
import math
import random

import pytest
import torch

from model.device.replay import Replay
from server.engine.core.limits import SchedulerConfig
from server.engine.link.local import LocalEngine
from server.engine.link.protocol import Shutdown
from server.engine.runner.decode_graphs import DecodeGraphs, GraphKey, row_counts
from server.engine.runner.prefill_graphs import PrefillGraphs, PrefillKey, token_counts
from server.engine.runner.sampled_tokens import DrawnTokens
from server.engine.runner.step_graph import StepModel
from tests.engine.runner.test_engine_model import (
    assert_all_free,
    greedy,
    make_engine,
    random_prompt,
    tokens,
)
from tests.tiny_checkpoint import write_tiny_checkpoint

CPU = torch.device("cpu")


class Again:
    """Records on a CPU: computes again on the same memory, and poisons what the last replay left."""

    def __init__(self):
        self.runs = 0

    def record(self, compute):
        results = compute()

        def run():
            self.runs += 1
            for result in results:
                result.fill_(float("nan") if result.is_floating_point() else -7)
            for result, again in zip(results, compute(), strict=True):
                result.copy_(again)

        return Replay(run, results)


class Broken:
    def record(self, compute):
        raise RuntimeError("operation not permitted when stream is capturing")


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


def test_log_probabilities_of_the_most_likely_tokens_need_no_sampler(checkpoint, monkeypatch):
    prompts = [[5, 6, 7, 8], [9], [10, 11]]

    def found(engine):
        requests = [greedy(i, prompt, 20, logprobs=i != 1) for i, prompt in enumerate(prompts)]
        return [
            [(event.token_id, event.logprob) for event in events]
            for events in engine.generate(requests)
        ]

    expected = found(make_engine(checkpoint))
    engine = recording_engine(checkpoint, Again())
    # Drawing row by row would be right too, and slower.
    monkeypatch.setattr(engine.engine._runner, "_sampler", None)

    assert found(engine) == expected
    assert [all(p is None for _, p in events) for events in expected] == [False, True, False]


def test_preempted_sequences_find_their_new_blocks_in_the_recording(checkpoint):
    rng = random.Random(2)
    prompts = [random_prompt(rng, 20, 40) for _ in range(8)]
    expected = answers(make_engine(checkpoint, max_num_seqs=20), prompts)
    recorder = Again()

    engine = recording_engine(checkpoint, recorder, kv_cache_tokens=272)

    assert answers(engine, prompts) == expected
    assert engine.engine.stats().num_preemptions > 0
    assert recorder.runs > 20


def test_a_step_that_was_never_recorded_is_after_some_time(checkpoint):
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

    graphs = engine.engine._runner._graphs
    decode, prefill = graphs.decode.recordings.recorded, graphs.prefill.recordings.recorded
    assert [key.num_rows for key in decode] == row_counts(20)
    assert [key.num_tokens for key in prefill if key.num_seqs == 1] == token_counts(256)
    assert {key.num_seqs for key in prefill if not key.num_rows} == {1, 8}
    assert {key.num_rows for key in prefill} == {0, 16, 20}
    quiet, *between, last = asked
    assert 0 < quiet < 1
    assert between == [0] * (len(decode) + len(prefill) + 1)
    assert last == math.inf


def test_nothing_is_recorded_while_requests_follow_each_other_closely(checkpoint, monkeypatch):
    engine = recording_engine(checkpoint, Again(), ahead=0)
    messages = [greedy(1, [1, 2, 3], 2), greedy(2, [4], 2), Shutdown()]

    def receive(*, wait):
        return [messages.pop(0)] if wait else []

    monkeypatch.setattr(engine.channel, "receive", receive)
    engine.engine.run()

    assert not messages
    assert sum(bool(reason) for s in engine.channel.steps for reason in s.finish_reasons) == 2
    graphs = engine.engine._runner._graphs
    assert not graphs.prefill.recordings.recorded


def test_log_probabilities_of_a_prompt_are_computed_without_a_recording(checkpoint):
    prompts = [[5, 6, 7, 8], [9]]
    plain = make_engine(checkpoint)
    engine = recording_engine(checkpoint, Again())
    expected = answers(plain, prompts, prompt_logprobs=True)

    assert answers(engine, prompts, prompt_logprobs=True) == expected


def test_what_cannot_be_recorded_is_launched_and_said_once_for_each_kind(checkpoint, caplog):
    with caplog.at_level(logging.WARNING, "tessera.engine"):
        engine = recording_engine(checkpoint, Broken())
        found = answers(engine, [[1, 2, 3], [4, 5]])

    assert found == answers(make_engine(checkpoint), [[1, 2, 3], [4, 5]])
    reason = "failed: operation not permitted when stream is capturing"
    assert [r.getMessage() for r in caplog.records if "recorded" in r.getMessage()] == [
        f"no more steps are recorded: GraphKey(num_rows=1, num_columns=32) {reason}",
        f"no more steps are recorded: PrefillKey(num_tokens=16, num_seqs=1, num_columns=32, "
        f"num_rows=0) {reason}",
    ]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (20, [1, 2, 4, 8, 16, 20]),
        (200, [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 200]),
    ],
)
def test_recordings_are_made_for_numbers_that_leave_few_rows_unused(most, expected):
    assert row_counts(most) == expected


def test_a_recording_with_long_tables_is_taken_where_the_short_ones_end(checkpoint):
    engine = make_engine(checkpoint)
    runner = engine.engine._runner
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=8 * 200)
    model = StepModel(runner._model, runner._kv_cache, Again(), DrawnTokens(5, CPU))
    graphs = DecodeGraphs(model, limits)

    def key(start):
        scheduled = type("Scheduled", (), {"start": start})()
        return next(graphs._keys((scheduled, scheduled, scheduled)))

    assert key(0) == key(8 * 64 - 1) == GraphKey(4, 64)
    assert key(8 * 64) == key(8 * 128 - 1) == GraphKey(4, 128)
    assert key(8 * 128) == key(8 * 200 - 1) == GraphKey(4, 200)


# --- prompts ----------------------------------------------------------------------------------------------------


def test_prompts_come_from_recordings_that_leave_at_most_a_fifth_unused():
    counts = token_counts(8192)

    assert counts[:8] == [16, 20, 24, 28, 32, 40, 48, 56]
    assert counts[-3:] == [6144, 7168, 8192]
    assert all(larger <= 1.25 * smaller for smaller, larger in itertools.pairwise(counts))
    assert token_counts(100)[-2:] == [96, 100]
    assert token_counts(3) == [3]


def test_a_prompt_takes_the_smallest_recording_that_it_fits_in(checkpoint):
    runner = make_engine(checkpoint).engine._runner
    limits = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=8 * 200)
    model = StepModel(runner._model, runner._kv_cache, Again(), DrawnTokens(65, CPU))
    graphs = PrefillGraphs(model, limits)

    def key(*chunks):
        scheduled = [type("Chunk", (), {"start": a, "num_tokens": n})() for a, n in chunks]
        return next(graphs._keys(tuple(scheduled)))

    assert key((0, 2)) == PrefillKey(16, 1, 64)
    assert key((0, 129)) == PrefillKey(160, 1, 64)
    assert key((8 * 64 - 100, 100)) == PrefillKey(112, 1, 64)
    assert key((8 * 64 - 99, 100)) == PrefillKey(112, 1, 200)
    assert key((8 * 199, 8)) == PrefillKey(16, 1, 200)
    assert key((0, 10), (8, 20)) == PrefillKey(32, 8, 64)
    assert key(*[(0, 2)] * 9) == PrefillKey(20, 64, 64)


@pytest.mark.parametrize("budget", [20, 64])
def test_chunks_prefix_hits_and_crowds_of_prompts_give_the_tokens_of_steps_without_recordings(
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

    for _ in range(3):  # what was missed is recorded in between
        assert answers(engine, prompts) == expected
        while engine.engine._runner.use_idle_time():
            pass
    before = recorder.runs
    assert answers(engine, prompts) == expected

    assert engine.engine.stats().prefix_cache_hit_tokens > 0
    assert recorder.runs - before > 30
    assert_all_free(engine)
