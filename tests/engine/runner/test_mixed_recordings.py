"""Steps with decode rows and prompts use one recording and give the tokens of steps without recordings."""

import math
import random

import pytest

from model.sampling.parameters import SamplingParams
from server.engine.core.messages import AbortRequests
from server.engine.core.request import GenerateRequest
from tests.engine.runner.step.test_recordings import Again
from tests.engine.runner.test_engine_model import (
    assert_all_free,
    make_engine,
    random_prompt,
)
from tests.marks import slow_except
from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


class Watched:
    """An engine with recordings that notes (output, number of replays) of each step."""

    def __init__(self, checkpoint, *, ahead=math.inf, overlap=False, sharing_rule=None, **changes):
        self.engine = make_engine(checkpoint, max_num_seqs=20, **changes)
        self.engine.engine._runs_ahead = overlap
        self.recorder, self.steps = Again(), []
        self.runner = self.engine.engine._runner
        self.runner.sharing_rule = sharing_rule
        self.runner.record_steps(self.engine.engine._scheduler.config, self.recorder)
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
        """Return the numbers of replays of the steps with both decode rows and prompts, or of the other steps."""
        return [
            runs for output, runs in self.steps if mixed == bool(output.decode and output.prefill)
        ]


def arrivals(count, generator_seed, first=0, **sampling):
    """Return requests with the step before which each arrives, so that prompts run beside decode rows."""
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
    """Return the (token, log-probability) pairs of requests that arrive, or are aborted, while others run."""
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
    """Return the same for requests that run one after the other, without recordings."""
    engine = make_engine(checkpoint, enable_prefix_caching=False)
    return {
        request.request_id: [(e.token_id, e.logprob) for e in engine.generate([request])[0]]
        for _, request in coming
    }


def only_tokens(found):
    return {request_id: [token for token, _ in pairs] for request_id, pairs in found.items()}


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "a step ahead"])
@pytest.mark.parametrize("cache", [4096, 152], ids=["no preemption", "preemption"])
@pytest.mark.parametrize("budget", slow_except([64], [20, 64, 256]))
def test_prompts_that_arrive_during_decoding_change_no_tokens(checkpoint, budget, cache, overlap):
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


def test_a_single_token_within_a_prompt_is_not_sampled(checkpoint):
    # The budget splits a single token off the second prompt in the first step, and off other prompts later.
    rng = random.Random(3)
    coming = [(0, ask(i, random_prompt(rng, n, n), 12)) for i, n in enumerate([39, 20, 37, 37])]
    watched = Watched(checkpoint, overlap=True, max_num_batched_tokens=40)

    found = serve(watched.engine, coming)

    assert only_tokens(found) == only_tokens(alone(checkpoint, coming))
    unsampled = [
        runs
        for output, runs in watched.steps
        if output.prefill and any(not s.num_logits for s in output.decode)
    ]
    assert unsampled
    assert set(unsampled) == {1}


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


def test_sampled_tokens_and_penalties_are_those_of_steps_without_recordings(checkpoint):
    sampling = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2}
    coming = arrivals(20, 6) + arrivals(20, 6, first=20, **sampling)
    coming.sort(key=lambda item: item[0])
    watched = Watched(checkpoint, overlap=True)

    assert only_tokens(serve(watched.engine, coming)) == only_tokens(alone(checkpoint, coming))
    assert set(watched.replays(mixed=True)) == {1}


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "a step ahead"])
def test_aborted_sequences_do_not_change_the_others(checkpoint, overlap):
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


def test_steps_with_prompt_logprobs_and_decode_rows_are_launched_without_a_recording(checkpoint):
    coming = arrivals(8, 8)
    coming.append((5, ask(50, [5, 6, 7, 8], 4, prompt_logprobs=True)))
    coming.sort(key=lambda item: item[0])
    watched = Watched(checkpoint)

    assert only_tokens(serve(watched.engine, coming)) == only_tokens(alone(checkpoint, coming))
    assert set(watched.replays(mixed=True)) == {0, 1}


def test_steps_that_read_a_shared_prefix_once_are_recorded(checkpoint):
    common = random_prompt(random.Random(9), 70, 70)
    coming = [(2 * i, ask(i, [*common, i, i + 1], 12)) for i in range(8)]
    watched = Watched(checkpoint, sharing_rule=lambda *_: True)
    expected = only_tokens(alone(checkpoint, coming))

    assert only_tokens(serve(watched.engine, coming)) == expected

    # Steps use recordings without shared blocks until the others are made.
    assert 0 not in [runs for _, runs in watched.steps]
    while watched.runner.use_idle_time():
        pass
    made = watched.runner.recorded.recorded
    sharing = [bucket for bucket in made if bucket.shared_blocks]
    # 70 tokens fill 8 blocks of 8, which are shared in multiples of four.
    assert {bucket.shared_blocks for bucket in sharing} == {8}
    assert {bool(bucket.prompt_seqs) for bucket in sharing} == {False, True}
    again = [(when, ask(100 + i, [*common, i, i + 1], 12)) for i, (when, _) in enumerate(coming)]
    found = only_tokens(serve(watched.engine, again))
    assert [found[100 + i] for i in range(8)] == [expected[i] for i in range(8)]


def test_without_idle_time_a_mixed_step_uses_two_recordings_and_never_waits(checkpoint):
    watched = Watched(checkpoint, ahead=0)

    for repeat in range(5):
        coming = [(n, ask(100 * repeat + n, [7, 8, 9], 3)) for n in range(40)]
        assert len(serve(watched.engine, coming)) == 40 * (repeat + 1)

    made = watched.runner.recorded.recorded
    assert not [bucket for bucket in made if bucket.rows and bucket.prompt_seqs]
    assert watched.replays(mixed=True)[-50:] == [2] * 50
    while watched.runner.use_idle_time():
        pass
    coming = [(n, ask(1000 + n, [7, 8, 9], 3)) for n in range(10)]
    watched.steps.clear()
    serve(watched.engine, coming)
    assert set(watched.replays(mixed=True)) == {1}
