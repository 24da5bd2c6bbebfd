"""The prefix cache of hybrids: prompts begin at snapshots of the states, wherever they share a beginning."""

import dataclasses
import random

import pytest

from tests.engine.runner.test_engine_model import assert_all_free, greedy, make_engine
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE

BLOCK = 16
UNITS = {"lfm2": BLOCK, "qwen3.5": 64}
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
        return make_engine(folders[name], quantization="none", **(config | changes))

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
@pytest.mark.parametrize(("shared", "own"), [(1600, 600), (1500, 700)])
@pytest.mark.parametrize("name", UNITS)
def test_all_requests_with_a_common_beginning_begin_at_its_end(start, name, shared, own, warm):
    engine, rng = start(name, max_num_seqs=16), random.Random(0)
    found = note_cached_tokens(engine)
    [common] = texts(rng, shared)
    requests = [
        greedy(i, common + own_text, 1)
        for i, own_text in enumerate(texts(rng, *[own] * (NUM_REQUESTS + 1)))
    ]
    whole = shared // UNITS[name] * UNITS[name]

    if warm:
        engine.generate(requests[:1])
    engine.generate(requests[1:])
    counts = sorted(found[it.request_id] for it in requests[1:])

    assert counts == ([] if warm else [0]) + [whole] * (NUM_REQUESTS - (not warm))
    assert_all_free(engine)
