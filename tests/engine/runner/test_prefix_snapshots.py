"""The prefix cache of hybrids: prompts begin at snapshots of the states, wherever they share a beginning."""

import dataclasses
import itertools
import random

import msgspec
import pytest

from kernels.recurrent.problem import CHUNK
from server.engine.runner.step.model_runner import ModelRunner
from tests.engine.runner.test_engine_model import assert_all_free, greedy, make_engine
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE

BLOCK = 16
UNITS = {"lfm2": BLOCK, "qwen3.5": CHUNK}
NUM_REQUESTS = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny checkpoints of hybrids, by name."""
    made = {}
    for name in UNITS:
        made[name] = tmp_path_factory.mktemp("hybrid")
        case = CASES[name]
        changes = case.changes | {"max_position_embeddings": 4096}
        dataclasses.replace(case, changes=changes).save(made[name])
    return made


@pytest.fixture
def start(folders):
    def start(name, **changes):
        config = {"max_model_len": 4096, "kv_cache_tokens": 1 << 18, "block_size": BLOCK}
        return make_engine(folders[name], **({"quantization": "none"} | config | changes))

    return start


def texts(rng, *lengths):
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def note_cached_tokens(engine):
    """Return a dictionary that gets the tokens of the prefix cache that each request begins with, by its id."""
    found, send = {}, engine.channel.send

    def note(message):
        found.update((it.request_id, it.num_cached_tokens) for it in message.started)
        send(message)

    engine.channel.send = note
    return found


@pytest.mark.parametrize("warm", [True, False], ids=["after one that warms the cache", "at once"])
@pytest.mark.parametrize(("shared", "other"), [(1600, 600), (1500, 700)])
@pytest.mark.parametrize("name", UNITS)
def test_all_requests_with_a_common_beginning_begin_at_its_end(start, name, shared, other, warm):
    engine, rng = start(name, max_num_seqs=16, state_snapshots=300), random.Random(0)
    found = note_cached_tokens(engine)
    [common] = texts(rng, shared)
    requests = [
        greedy(i, common + text, 1)
        for i, text in enumerate(texts(rng, *[other] * (NUM_REQUESTS + 1)))
    ]
    whole = shared // UNITS[name] * UNITS[name]

    if warm:
        engine.generate(requests[:1])
    engine.generate(requests[1:])
    counts = sorted(found[it.request_id] for it in requests[1:])

    # There are slots for a state after every unit of a prompt.
    assert counts == ([] if warm else [0]) + [whole] * (NUM_REQUESTS - (not warm))
    assert_all_free(engine)


def answers(engine, requests, *, alone=False):
    """Return the tokens with their log-probabilities, whose bits show those of the states."""
    found = [engine.generate([it])[0] for it in requests] if alone else engine.generate(requests)
    return [[(event.token_id, event.logprob) for event in events] for events in found]


@pytest.fixture
def exact(start):
    """Start an engine in which the bits of a token depend on its sequence alone: with the products of the C library."""

    def exact(name, **changes):
        return start(name, quantization="int8", dtype="auto", **changes)

    return exact


def requests_of(rng, max_new_tokens=12):
    """Return requests; all begin alike, and two again are alike for longer."""
    common, longer = texts(rng, 300, 150)
    others = texts(rng, *range(20, 120, 13))
    prompts = [common + (longer if i % 3 == 0 else []) + text for i, text in enumerate(others)]
    return [greedy(i, it, max_new_tokens, logprobs=True) for i, it in enumerate(prompts)]


@pytest.fixture
def cold(exact):
    def cold(name, requests):
        return answers(exact(name, enable_prefix_caching=False), requests, alone=True)

    return cold


@pytest.mark.parametrize("name", UNITS)
def test_replies_after_a_hit_have_the_bits_of_those_without_a_cache(exact, cold, name):
    requests = requests_of(random.Random(1))
    expected = cold(name, requests)
    engine = exact(name)

    for alone in (False, True, False):
        assert answers(engine, requests, alone=alone) == expected
        assert_all_free(engine)
    assert engine.engine.stats().num_snapshot_hits > 2 * len(requests)


@pytest.mark.parametrize("name", UNITS)
def test_replies_in_small_steps_have_the_same_bits(exact, cold, name):
    requests = requests_of(random.Random(2))
    engine = exact(name, max_num_seqs=3, max_num_batched_tokens=67, state_snapshots=3)

    assert answers(engine, requests) == cold(name, requests)
    assert engine.engine.stats().num_snapshots_evicted > 0


@pytest.mark.parametrize("name", UNITS)
def test_replies_of_preempted_requests_have_the_same_bits(exact, cold, name):
    requests = requests_of(random.Random(3), 80)
    engine = exact(name, kv_cache_tokens=1600, max_model_len=800)

    assert answers(engine, requests) == cold(name, requests)
    assert engine.engine.stats().num_preemptions > 0
    assert_all_free(engine)


@pytest.mark.parametrize("name", UNITS)
def test_replies_after_a_failed_step_have_the_same_bits(exact, cold, name, monkeypatch):
    requests = requests_of(random.Random(4))
    expected, engine = cold(name, requests), exact(name)
    launch, count = ModelRunner.launch, itertools.count()

    def fail(runner, output):
        pending = launch(runner, output)
        if next(count) in (1, 6, 15):
            raise RuntimeError("after the states were written")
        return pending

    monkeypatch.setattr(ModelRunner, "launch", fail)

    assert answers(engine, requests) == expected
    assert engine.engine.stats().num_failed_steps == 3


@pytest.mark.parametrize("name", UNITS)
def test_turns_of_a_conversation_begin_at_the_end_of_the_prompt_before(exact, cold, name):
    rng, engine, unit = random.Random(5), exact(name), UNITS[name]
    found = note_cached_tokens(engine)
    [prompt] = texts(rng, 100)
    least = 0
    for turn in range(4):
        request = greedy(turn, prompt, 30, logprobs=True)
        [reply] = answers(engine, [request])
        assert [reply] == cold(name, [request])
        assert found[turn] >= least
        least = (len(prompt) - 1) // unit * unit
        prompt = [*prompt, *(token for token, _ in reply), *texts(rng, 40)[0]]


def test_requests_with_other_salts_begin_at_no_snapshot(exact):
    engine, rng = exact("qwen3.5"), random.Random(6)
    found = note_cached_tokens(engine)
    [prompt] = texts(rng, 200)

    for i, salt in enumerate((None, "a", "b", "a", None)):
        request = msgspec.structs.replace(greedy(i, prompt, 4), cache_salt=salt)
        engine.generate([request])

    assert list(found.values()) == [0, 0, 0, 192, 192]
