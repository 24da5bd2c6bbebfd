"""Decode rows and prompts from one recording: one replay for a step, and the tokens of steps without recordings."""

import math
import random

import pytest
import torch

from model.device.replay import Replay
from server.engine.core.limits import SchedulerConfig
from server.engine.core.request import GenerateRequest, SamplingParams
from server.engine.link.protocol import AbortRequests
from server.engine.runner.dummy_steps import crowds
from server.engine.runner.prefill_graphs import PrefillGraphs, PrefillKey, token_counts
from server.engine.runner.sampled_tokens import DrawnTokens
from server.engine.runner.step_graph import StepModel
from server.engine.runner.step_graphs import StepGraphs
from tests.engine.runner.test_decode_graphs import Again
from tests.engine.runner.test_engine_model import (
    assert_all_free,
    make_engine,
    random_prompt,
)
from tests.marks import slow_except
from tests.tiny_checkpoint import write_tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


class Watched:
    """An engine that records, and what each of its steps was: (output, replays it took)."""

    def __init__(self, checkpoint, *, ahead=math.inf, overlap=False, sharing_pays=None, **changes):
        self.engine = make_engine(checkpoint, max_num_seqs=20, **changes)
        self.engine.engine._runs_ahead = overlap
        self.recorder, self.steps = Again(), []
        self.runner = self.engine.engine._runner
        self.runner.record_steps(self.engine.engine._scheduler.config, self.recorder)
        if sharing_pays is not None:
            model = self.runner._graphs.decode._model
            limits = self.engine.engine._scheduler.config
            self.runner._graphs = StepGraphs(model, limits, sharing_pays)
        while ahead > 0 and self.runner.use_idle_time():
            ahead -= 1
        launch = self.runner.launch

        def watched(output):
            before = self.recorder.runs
            pending = launch(output)
            self.steps.append((output, self.recorder.runs - before))
            return pending

        self.runner.launch = watched

    def replays(self, *, mixed):
        """How many replays the steps took that had both decode rows and prompts, or one of the two."""
        return [
            runs for output, runs in self.steps if mixed == bool(output.decode and output.prefill)
        ]


def arrivals(count, generator_seed, first=0, **sampling):
    """Requests with the number of the step before which each comes, so that prompts meet decode rows."""
    rng = random.Random(generator_seed)
    return [
        (2 * i, ask(first + i, random_prompt(rng, 2, 60), rng.randint(5, 30), **sampling))
        for i in range(count)
    ]


def ask(request_id, prompt, max_new_tokens, **sampling):
    params = {"max_new_tokens": max_new_tokens, "temperature": 0.0} | sampling
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(**params)
    )


def serve(engine, coming, aborted=()):
    """The (token, log-probability) pairs of requests that come, and are aborted, while others are served."""
    coming, aborted, step = list(coming), dict(aborted), 0
    while coming or engine.engine.has_work:
        while coming and coming[0][0] <= step:
            engine.channel.inbox.append(coming.pop(0)[1])
        if step in aborted:
            engine.channel.inbox.append(AbortRequests([aborted[step]]))
        if engine.channel.inbox:
            engine.engine.receive(wait=0)
        if engine.engine.has_work:
            engine.engine.step()
        step += 1
    found = {}
    for message in engine.channel.steps:
        for i, request_id in enumerate(message.request_ids):
            event = message.event(i)
            found.setdefault(request_id, []).append((event.token_id, event.logprob))
    return found


def alone(checkpoint, coming):
    """The same for requests that are served one after the other, without recordings."""
    engine = make_engine(checkpoint, enable_prefix_caching=False)
    return {
        request.request_id: [(e.token_id, e.logprob) for e in engine.generate([request])[0]]
        for _, request in coming
    }


def only_tokens(found):
    return {request_id: [token for token, _ in pairs] for request_id, pairs in found.items()}


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "a step ahead"])
@pytest.mark.parametrize("cache", [4096, 152], ids=["roomy", "preempting"])
@pytest.mark.parametrize("budget", slow_except([64], [20, 64, 256]))
def test_prompts_that_arrive_while_others_decode_change_no_token(
    checkpoint, budget, cache, overlap
):
    coming = arrivals(40, budget)
    watched = Watched(
        checkpoint, overlap=overlap, max_num_batched_tokens=budget, kv_cache_tokens=cache
    )

    found = serve(watched.engine, coming)

    assert only_tokens(found) == only_tokens(alone(checkpoint, coming))
    assert (watched.engine.engine.stats().num_preemptions > 0) == (cache == 152)
    mixed = watched.replays(mixed=True)
    assert len(mixed) > 20
    assert set(mixed) == {1}
    assert_all_free(watched.engine)


def test_a_token_within_a_prompt_draws_nothing_beside_the_others(checkpoint):
    # The budget leaves one token of the second prompt to the first step, and of others to later ones.
    rng = random.Random(3)
    coming = [(0, ask(i, random_prompt(rng, n, n), 12)) for i, n in enumerate([39, 20, 37, 37])]
    watched = Watched(checkpoint, overlap=True, max_num_batched_tokens=40)

    found = serve(watched.engine, coming)

    assert only_tokens(found) == only_tokens(alone(checkpoint, coming))
    undrawn = [
        runs
        for output, runs in watched.steps
        if output.prefill and any(not s.samples for s in output.decode)
    ]
    assert undrawn
    assert set(undrawn) == {1}


def test_log_probabilities_are_those_of_steps_without_recordings(checkpoint):
    coming = arrivals(20, 4, logprobs=True)
    watched = Watched(checkpoint)

    found = serve(watched.engine, coming)

    expected = alone(checkpoint, coming)
    assert only_tokens(found) == only_tokens(expected)
    for request_id, pairs in expected.items():
        ours = [logprob for _, logprob in found[request_id]]
        assert ours == pytest.approx([logprob for _, logprob in pairs], abs=1e-4)
    assert set(watched.replays(mixed=True)) == {1}


def test_drawn_tokens_and_penalties_are_those_of_steps_without_recordings(checkpoint):
    drawn = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2}
    coming = arrivals(20, 6) + arrivals(20, 6, first=20, **drawn)
    coming.sort(key=lambda item: item[0])
    watched = Watched(checkpoint, overlap=True)

    assert only_tokens(serve(watched.engine, coming)) == only_tokens(alone(checkpoint, coming))
    assert set(watched.replays(mixed=True)) == {1}


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "a step ahead"])
def test_aborted_sequences_leave_the_others_alone(checkpoint, overlap):
    coming = arrivals(20, 7)
    watched = Watched(checkpoint, overlap=overlap, max_num_batched_tokens=40)

    found = only_tokens(serve(watched.engine, coming, aborted={9: 3, 10: 4, 21: 10}))

    expected = only_tokens(alone(checkpoint, coming))
    for request_id, ours in found.items():
        if request_id in (3, 4, 10):
            assert ours == expected[request_id][: len(ours)]
        else:
            assert ours == expected[request_id]
    assert_all_free(watched.engine)


def test_prompts_scored_beside_decode_rows_are_launched(checkpoint):
    coming = arrivals(8, 8)
    coming.append((5, ask(50, [5, 6, 7, 8], 4, prompt_logprobs=True)))
    coming.sort(key=lambda item: item[0])
    watched = Watched(checkpoint)

    assert only_tokens(serve(watched.engine, coming)) == only_tokens(alone(checkpoint, coming))
    assert set(watched.replays(mixed=True)) == {0, 1}


def test_a_step_that_should_read_a_shared_prefix_once_is_launched(checkpoint):
    common = random_prompt(random.Random(9), 40, 40)
    coming = [(2 * i, ask(i, [*common, i, i + 1], 12)) for i in range(8)]
    watched = Watched(checkpoint, sharing_pays=lambda *_: True)

    assert only_tokens(serve(watched.engine, coming)) == only_tokens(alone(checkpoint, coming))

    for output, runs in watched.steps:
        if output.prefill and output.decode:
            assert runs == (len(output.decode) < 2)


def test_without_idle_time_a_mixed_step_takes_two_recordings_and_never_waits_for_one(checkpoint):
    watched = Watched(checkpoint, ahead=0)

    for repeat in range(5):
        coming = [(n, ask(100 * repeat + n, [7, 8, 9], 3)) for n in range(40)]
        assert len(serve(watched.engine, coming)) == 40 * (repeat + 1)

    graphs = watched.runner._graphs
    assert not [key for key in graphs.prefill.recordings.recorded if key.num_rows]
    assert watched.replays(mixed=True)[-50:] == [2] * 50
    while watched.runner.use_idle_time():
        pass
    coming = [(n, ask(1000 + n, [7, 8, 9], 3)) for n in range(10)]
    watched.steps.clear()
    serve(watched.engine, coming)
    assert set(watched.replays(mixed=True)) == {1}


# --- kinds ------------------------------------------------------------------------------------------------------


def make_graphs(checkpoint, **limits):
    """The recordings of prompts of which none computes anything."""

    class Nothing:
        def record(self, _compute):
            return Replay(lambda: None, ())

    runner = make_engine(checkpoint).engine._runner
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 1600} | limits
    drawn = DrawnTokens(limits["max_num_seqs"] + 1, CPU)
    model = StepModel(runner._model, runner._kv_cache, Nothing(), drawn)
    return PrefillGraphs(model, SchedulerConfig(**limits))


def made_ahead(graphs):
    while graphs.recordings.record_next():
        pass
    return list(graphs.recordings.recorded)


def test_kinds_are_few_and_short_prompts_are_recorded_before_them_and_long_ones_behind(checkpoint):
    kinds = made_ahead(make_graphs(checkpoint))

    mixed = [key for key in kinds if key.num_rows]
    assert [(key.num_columns, bool(key.num_rows)) for key in kinds] == sorted(
        (key.num_columns, bool(key.num_rows)) for key in kinds
    )
    assert mixed[:4] == [
        PrefillKey(128, 32, 64, 256),
        PrefillKey(128, 32, 64, 64),
        PrefillKey(128, 32, 64, 16),
        PrefillKey(192, 32, 64, 256),
    ]
    assert sorted({key.num_tokens for key in mixed}) == [
        128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    ]  # fmt: skip
    assert len(mixed) == 9 * 3 * 2
    assert next(key for key in kinds if not key.num_rows) == PrefillKey(16, 1, 64)


@pytest.mark.parametrize(
    ("most", "rows"), [(1, set()), (2, {2}), (16, {16}), (20, {16, 20}), (96, {16, 64, 96})]
)
def test_kinds_have_no_more_decode_rows_than_a_step(checkpoint, most, rows):
    kinds = made_ahead(make_graphs(checkpoint, max_num_seqs=most, max_num_batched_tokens=96))

    assert {key.num_rows for key in kinds} - {0} == rows
    assert {key.num_seqs for key in kinds if key.num_rows} <= {min(32, most)}


def test_a_mixed_step_takes_the_smallest_kind_that_it_fits_in(checkpoint):
    graphs = make_graphs(checkpoint)

    def keys(starts, *chunks):
        decode = [scheduled(start, 1) for start in starts]
        prefill = [scheduled(start, count) for start, count in chunks]
        return list(graphs._mixed_keys(tuple(decode), tuple(prefill)))

    def scheduled(start, num_tokens):
        return type("Scheduled", (), {"start": start, "num_tokens": num_tokens})()

    assert keys([5], (0, 2))[0] == PrefillKey(128, 32, 64, 16)
    assert keys([5] * 17, (0, 128))[0] == PrefillKey(128, 32, 64, 64)
    assert keys([5] * 65, (0, 100), (8, 100))[0] == PrefillKey(256, 32, 64, 256)
    assert keys([8 * 64 - 1], (0, 8 * 64))[0] == PrefillKey(512, 32, 64, 16)
    assert keys([8 * 64], (0, 8))[0] == PrefillKey(128, 32, 200, 16)
    assert keys([5] * 64, (8 * 63, 9)) == [
        PrefillKey(128, 32, 200, 64),
        PrefillKey(128, 32, 200, 256),
    ]


def test_more_prompts_than_a_kind_has_are_computed_apart_from_decode_rows(checkpoint):
    graphs = make_graphs(checkpoint)
    made_ahead(graphs)
    crowd = {
        len(output.prefill): output.prefill
        for output in crowds(8, SchedulerConfig(64, 2048, 1600), block_size=8)
    }
    lone = next(crowds(8, SchedulerConfig(64, 2048, 1600), block_size=8)).decode

    assert graphs.prepare_mixed(lone, crowd[64]) is None
    assert graphs.prepare_mixed(lone, crowd[32]) is not None


def test_mixed_counts_double_in_two_steps():
    assert token_counts(1000, 128, 2) == [128, 192, 256, 384, 512, 768, 1000]
    assert token_counts(128, 128, 2) == [128]
    assert token_counts(40, 128, 2) == [40]
