"""Whatever is proposed, replies have the bytes that they have without drafts."""

import dataclasses
import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.core.schedule.draft import NUM_MATCH_CLASSES, Draft
from server.engine.runner.start import dummy_steps
from tests.engine.runner.drafts import WAYS, requests
from tests.engine.runner.test_engine_model import assert_all_free, greedy, make_engine
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

MOST = 7
LIMITS = {
    "roomy": {},
    "short steps, chunks": {"max_num_seqs": 3, "max_num_batched_tokens": 11},
    "few slots": {"max_num_seqs": 4, "state_snapshots": 0, "max_draft_tokens": 2},
    "preemptions": {
        "kv_cache_tokens": 168,
        "max_num_seqs": 8,
        "block_size": 3,
        "max_model_len": 60,
    },
}
ENDS = tuple(range(0, VOCAB_SIZE, 8))
"""Ends of some of the sequences."""
PROPOSALS = st.lists(
    st.tuples(
        st.sampled_from(
            ["right", "wrong", "partly right", "end", "beyond the end", "too long", "none"]
        ),
        st.integers(1, MOST),
        st.integers(0, 2**16),
    ),
    min_size=1,
    max_size=12,
)
"""What is proposed for one row after the other, again from the start after the last: kind, length and a number."""


def made_requests():
    """Return requests of which some end by a token, and some prompts begin alike."""
    rng = random.Random(4)
    ways = [
        *WAYS,
        *({**way, "eos_token_ids": ENDS[::2], "stop_token_ids": ENDS[1::2]} for way in WAYS),
    ]
    ways = [{**way, "logprobs": True} for way in ways]
    made = requests(rng, ways, most_prompt=24, max_new_tokens=20, deterministic=True)
    for request in made[::3]:
        request.prompt_token_ids[:] = made[0].prompt_token_ids + request.prompt_token_ids[:6]
    return made


class Proposer:
    """A drafter that proposes a list of proposals, whatever the sequence is.

    Args:
        texts: by request id, the tokens that the request gets without drafts.
        proposals: see `PROPOSALS`.
    """

    def __init__(self, texts, proposals):
        self.texts, self.proposals, self.num_calls = texts, proposals, 0

    def begin_step(self):
        pass

    def propose(self, sequence, limit):
        kind, length, number = self.proposals[self.num_calls % len(self.proposals)]
        self.num_calls += 1
        text = self.texts[sequence.request_id]
        tokens = text[sequence.num_output_tokens :]
        if kind != "too long":
            tokens = tokens[:length]
        if kind == "wrong":
            tokens = [(token + 1 + number % 9) % VOCAB_SIZE for token in tokens]
        elif kind == "partly right" and tokens:
            tokens[number % len(tokens)] = number % VOCAB_SIZE
        elif kind == "end" and tokens:
            tokens[number % len(tokens)] = ENDS[number % len(ENDS)]
        elif kind == "beyond the end":
            tokens += [number % VOCAB_SIZE] * (limit - len(tokens))
        elif kind == "none":
            tokens = []
        if kind != "too long":
            tokens = tokens[:limit]
        return Draft(tuple(tokens), number % NUM_MATCH_CLASSES)

    def forget(self, sequence):
        pass


MODELS = {
    "llama": {},
    "gpt2": {},
    "olmo2": {},
    "qwen3.5": {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "intermediate_size": 96},
    "lfm2": {"block_multiple_of": 32},
    "granite4": {},
    "falcon h1": {"mamba_d_ssm": 128},
}
"""Checkpoints whose steps the C library computes as a whole, and layer by layer, some with states of fixed size."""


def write(name, folder):
    if name == "llama":
        return write_tiny_checkpoint(folder, intermediate_size=128, head_dim=32)
    case = CASES[name]
    changes = case.changes | MODELS[name] | {"vocab_size": VOCAB_SIZE}
    dataclasses.replace(case, changes=changes).save(folder)
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Return the engine of a model with some of `LIMITS`, and its events of `made_requests` without drafts."""

    @functools.cache
    def folder(name):
        return write(name, tmp_path_factory.mktemp("small"))

    @functools.cache
    def found(name, limits):
        config = {"dtype": "auto", "quantization": "int8", "max_num_batched_tokens": 256}
        engine = make_engine(folder(name), **(config | LIMITS[limits]))
        drafts = engine.engine._scheduler.drafts
        drafts.most = 0
        expected = engine.generate(made_requests())
        drafts.most = MOST
        for kind in drafts.kinds:
            kind.costs.note = lambda *_: None
            kind.costs.seconds = lambda _: 1.0
        return engine, expected

    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_requests_end_in_every_way_and_are_preempted(engines, name):
    ends = [events[-1].finish_reason.name for events in engines(name, "roomy")[1]]

    assert {"EOS", "STOP", "LENGTH"} == {*ends}
    assert engines(name, "preemptions")[0].engine.stats().num_preemptions
    for limits in LIMITS:
        engine, expected = engines(name, limits)
        assert engine.engine.info.plan.deterministic.requests == "all"
        assert expected == engines(name, "roomy")[1]


@pytest.mark.parametrize("name", MODELS)
def test_right_drafts_are_kept(engines, name):
    engine, expected = engines(name, "roomy")
    texts = {i: [event.token_id for event in events] for i, events in enumerate(expected)}
    engine.drafts.drafter = Proposer(texts, [("right", MOST, 0)])
    before = engine.engine.stats()

    assert engine.generate(made_requests()) == expected
    after = engine.engine.stats()
    kept = after.num_accepted_tokens - before.num_accepted_tokens
    assert kept == after.num_draft_tokens - before.num_draft_tokens > 100


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_drafts_cost_no_prefix_hit(engines, tmp_path, kind):
    write("granite4", tmp_path)

    def hits(most):
        rng = random.Random(9)
        limits = {"max_num_seqs": 2, "block_size": 8, "state_snapshots": 8}
        engine = make_engine(tmp_path, dtype="auto", quantization="int8", **limits)
        drafts = engine.engine._scheduler.drafts
        drafts.most = most
        for it in drafts.kinds:
            it.costs.note, it.costs.seconds = lambda *_: None, lambda _: 1.0
        texts, prompts = {}, [[rng.randrange(VOCAB_SIZE) for _ in range(30)] for _ in range(3)]
        drafts.drafter = Proposer(texts, [(kind, MOST, 1)])
        for turn in range(4):
            for i, prompt in enumerate(prompts):
                texts[10 * turn + i] = [7] * 12
                found = engine.generate([greedy(10 * turn + i, prompt, 12, logit_bias={7: 100.0})])[
                    0
                ]
                prompts[i] = [*prompt, *(it.token_id for it in found), *range(turn, turn + 9)]
        stats = engine.engine.stats()
        assert bool(stats.num_draft_tokens) == bool(most)
        return stats.prefix_cache_hit_tokens

    assert hits(MOST) == hits(0) > 0


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "granite4", "falcon h1"])
def test_a_dummy_step_with_a_draft_writes_no_state(tmp_path, name):
    # An engine of its own: the step writes keys and values to a block that the prefix cache may have.
    engine = make_engine(write(name, tmp_path), dtype="auto", quantization="int8")
    runner = engine.engine._runner
    fixed = [state for states in runner.kv_cache.fixed for state in states or ()]
    assert fixed
    before = [state.clone() for state in fixed]
    output = dummy_steps.deterministic(dummy_steps.draft(runner.kv_cache.block_size))

    result = runner.execute(output)
    runner.forget(output.decode[0].sequence.request_id)

    assert len(result.sampled.token_ids) == 2
    assert all(map(torch.equal, fixed, before))


@settings(max_examples=24)
@given(
    name=st.sampled_from(sorted(MODELS)),
    limits=st.sampled_from(sorted(LIMITS)),
    proposals=PROPOSALS,
)
def test_no_draft_changes_a_reply(engines, name, limits, proposals):
    engine, expected = engines(name, limits)
    texts = {i: [event.token_id for event in events] for i, events in enumerate(expected)}
    engine.drafts.drafter = Proposer(texts, proposals)

    assert engine.generate(made_requests()) == expected
    assert_all_free(engine)


@pytest.mark.slow
@settings(max_examples=400)
@given(
    name=st.sampled_from(sorted(MODELS)),
    limits=st.sampled_from(sorted(LIMITS)),
    proposals=PROPOSALS,
)
def test_no_draft_of_many_changes_a_reply(engines, name, limits, proposals):
    test_no_draft_changes_a_reply.hypothesis.inner_test(engines, name, limits, proposals)
