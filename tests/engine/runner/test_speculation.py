"""Replies have the same bytes with drafts from their own texts and from earlier answers, and without any."""

import random

import msgspec
import pytest

from tests.engine.runner.drafts import WAYS, compare, requests, without_drafts
from tests.engine.runner.test_engine_model import make_engine
from tests.tiny_checkpoint import write_tiny_checkpoint

LIMITS = {
    "small": {"max_num_seqs": 3, "max_num_batched_tokens": 24},
    "few blocks": {"kv_cache_tokens": 256},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("small"), intermediate_size=128, head_dim=32
    )


def engine_of(checkpoint, **limits):
    engine = make_engine(checkpoint, dtype="auto", quantization="int8", **limits)
    # Drafts of every length, whatever they cost: the clock of the test says that tokens are free.
    for kind in engine.engine._scheduler.drafts.kinds:
        kind.costs.note = lambda *_: None
        kind.costs.seconds = lambda _: 1.0
    return engine


def asked(seed):
    """Return requests whose prompts repeat themselves and each other."""
    rng = random.Random(seed)
    found = requests(rng, WAYS * 2, most_prompt=12, max_new_tokens=60)
    parts = [it.prompt_token_ids for it in found]
    return [
        msgspec.structs.replace(
            it,
            prompt_token_ids=(it.prompt_token_ids + rng.choice(parts)) * rng.randint(1, 3),
            cache_salt=rng.choice((None, "a", "b")),
            deterministic=True,
        )
        for it in found
    ]


@pytest.mark.parametrize("limits", LIMITS)
def test_the_bytes_are_those_without_drafts(checkpoint, limits):
    for seed in range(2):
        given = asked(seed)
        expected = without_drafts(engine_of(checkpoint, **LIMITS[limits])).generate(given)
        engine = engine_of(checkpoint, **LIMITS[limits])
        # Twice: the second time with the answers of the first.
        for _ in range(2):
            for one, other in zip(expected, engine.generate(given), strict=True):
                compare(strip(one), strip(other), exact=True, tolerance=0)

        stats = engine.engine.stats()
        assert 100 < stats.num_accepted_tokens <= stats.num_draft_tokens
        assert stats.num_free_blocks == stats.num_blocks
        assert not engine.engine._scheduler.idle_violations()


def strip(events):
    """Return events without what the request used, which drafts change."""
    return [msgspec.structs.replace(event, usage=None) for event in events]


def test_an_answer_given_before_takes_few_steps(checkpoint):
    engine = engine_of(checkpoint)
    given = requests(random.Random(3), WAYS[2:3], max_new_tokens=60, deterministic=True)
    steps = [0]
    for _ in range(2):
        engine.generate(given)
        steps.append(engine.engine.stats().num_steps)
    first, second = steps[1], steps[2] - steps[1]

    assert second <= 60 / 8 + 2
    assert first > 2 * second


def test_an_engine_without_deterministic_sequences_proposes_nothing(tmp_path):
    engine = make_engine(write_tiny_checkpoint(tmp_path))

    engine.generate(requests(random.Random(1), WAYS[:1], max_new_tokens=60))

    assert engine.engine.stats().num_draft_tokens == 0


@pytest.mark.parametrize("most", [0, 2])
def test_the_setting_is_the_limit(checkpoint, most):
    engine = engine_of(checkpoint, max_draft_tokens=most)
    scheduler, steps = engine.engine._scheduler, []
    schedule = scheduler.schedule

    def note():
        steps.append(schedule())
        return steps[-1]

    scheduler.schedule = note
    engine.generate(asked(1))

    longest = [max(map(len, it.decode.drafts)) for it in steps if it.decode.drafts is not None]
    assert max(longest, default=0) == most
