"""A step with k drafted tokens samples what k + 1 steps sample on a GPU, with the kernels of each kind of step."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import pytest

import kernels
from benchmarks.local_engine import LocalEngine
from kernels.attention import functional
from server.engine.core.messages import EngineConfig
from tests.engine.runner.drafts import WAYS, check, draft, requests
from tests.gpu.test_families_gpu import MODELS as FAMILIES
from tests.model.executors.float32_model import Float32Model
from tests.reliability.random_drafts_engine import propose_at_random
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

SHAPES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
MODELS = {
    "llama": {},
    "window": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 40,
    },
    "wide heads": {"head_dim": 128, "num_attention_heads": 4},
}  # fmt: skip
HYBRIDS = ("qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1")
"""Families with states of fixed size."""


@pytest.fixture
def planned(monkeypatch):
    """Count the plans of decode rows with several tokens, by kernel."""
    counts = Counter()
    plan = functional.plan_attention

    def counted(problem, batch, *given):
        made = plan(problem, batch, *given)
        if problem.max_query_tokens > 1:
            counts[made.selection.spec.name] += 1
        return made

    monkeypatch.setattr("model.executors.layers.attention_plans.plan_attention", counted)
    return counts


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    return write_tiny_checkpoint(tmp_path, **SHAPES | MODELS[request.param])


@pytest.fixture
def make_engine(folder):
    def make(**changes):
        config = {
            "model_path": str(folder), "model_id": "tiny", "device": "cuda", "max_model_len": 512,
            "kv_cache_tokens": 1 << 14, "block_size": 16, "max_num_seqs": 64,
        }  # fmt: skip
        engine = LocalEngine(EngineConfig(**(config | changes)))
        engine.engine._runs_ahead = False  # a row whose token is in flight has no draft
        return engine

    return make


def test_the_tokens_of_float32_are_those_of_single_steps(make_engine, planned):
    rng = random.Random(1)

    check(lambda: make_engine(dtype="float32"), requests(rng, most_prompt=90), rng, tolerance=1e-3)

    if kernels.detect("cuda").has_triton_tensor_cores:
        assert set(planned) == {"portable_decode"}


def test_deterministic_steps_have_the_same_bits(make_engine, planned):
    if not kernels.detect("cuda").has_triton_tensor_cores:
        pytest.skip("no batch-invariant kernel before sm_80")
    rng = random.Random(2)

    def engine():
        return make_engine(dtype="bfloat16")

    check(engine, requests(rng, most_prompt=90, deterministic=True), rng, exact=True)

    assert all("invariant" in name for name in planned)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_deterministic_steps_of_a_hybrid_have_the_same_bits(name, recorded, tmp_path):
    if not kernels.detect("cuda").has_triton_tensor_cores:
        pytest.skip("no batch-invariant kernel before sm_80")
    ends = {"vocab_size": VOCAB_SIZE, "bos_token_id": 256, "eos_token_id": 257}
    folder = write_tiny_checkpoint(tmp_path, model_type=name, **(FAMILIES[name] | ends))
    config = EngineConfig(
        model_path=str(folder), model_id="tiny", device="cuda", dtype="bfloat16", max_model_len=512,
        kv_cache_tokens=1 << 14, block_size=16, max_num_seqs=16, deterministic=True, cuda_graphs=recorded,
    )  # fmt: skip
    engines = []

    def engine():
        engines.append(LocalEngine(config))
        engines[-1].engine._runs_ahead = False  # a row whose token is in flight has no draft
        return engines[-1]

    rng = random.Random(7)
    # Beside other rows, a single row with a draft, whose step has another bucket.
    asked = requests(rng, most_prompt=90, deterministic=True)
    asked[0] = msgspec.structs.replace(
        asked[0], sampling=msgspec.structs.replace(asked[0].sampling, max_new_tokens=100)
    )
    steps = check(engine, asked, rng, exact=True)

    assert all(step.decode.batch.deterministic for step in steps)
    buckets = engines[-1].engine._runner.recorded.recorded if recorded else ()
    assert recorded == any(it.queries > 1 for it in buckets)


def test_a_bucket_of_rows_with_drafts_is_recorded_once_steps_needed_it(make_engine, planned):
    engines = []

    def engine():
        engines.append(make_engine(dtype="float32"))
        return engines[-1]

    rng = random.Random(3)
    check(engine, requests(rng, max_new_tokens=100), rng, tolerance=1e-3)

    assert any(it.queries > 1 for it in engines[-1].engine._runner.recorded.recorded)
    assert planned


def test_one_sequence_has_the_same_bits_with_drafts_in_a_single_launch(make_engine):
    if kernels.detect("cuda").sm != 90:
        pytest.skip("the single launch needs sm_90")
    rng = random.Random(5)
    engine, other = make_engine(dtype="bfloat16"), make_engine(dtype="bfloat16")
    assert engine.engine._runner.exact_rows == 8
    engine.engine._scheduler.drafts.most = 0
    propose_at_random(other.engine._scheduler.drafts)
    for request in requests(rng, most_prompt=90, max_new_tokens=60):
        assert other.generate([request]) == engine.generate([request])


def test_a_few_sequences_have_the_same_bits_with_drafts_in_a_single_launch(make_engine):
    if kernels.detect("cuda").sm != 90:
        pytest.skip("the single launch needs sm_90")
    rng = random.Random(6)
    asked = requests(rng, WAYS[:5], most_prompt=90, max_new_tokens=60)
    engine, other = make_engine(dtype="bfloat16"), make_engine(dtype="bfloat16")
    engine.engine._scheduler.drafts.most = 0
    propose_at_random(other.engine._scheduler.drafts)

    assert other.generate(asked) == engine.generate(asked)


def test_bfloat16_uses_the_decode_kernel_of_several_queries(make_engine, planned, folder):
    arch = kernels.detect("cuda")
    if not arch.has_triton_tensor_cores:
        pytest.skip("PyTorch's attention takes one query in a decode")
    rng = random.Random(4)
    asked = requests(rng, [{"temperature": 0.0, "logprobs": True}] * 4, max_new_tokens=30)
    engine = make_engine(dtype="bfloat16")
    expected = engine.generate(asked)
    texts = {i: [event.token_id for event in events] for i, events in enumerate(expected)}
    draft(engine, texts, rng)
    found = engine.generate(asked)

    assert set(planned) == {"hopper_decode" if arch.sm == 90 else "portable_decode"}
    truth = Float32Model(folder)
    for request, events, others in zip(asked, expected, found, strict=True):
        tokens = [event.token_id for event in events]
        largest = truth.logits(request.prompt_token_ids, tokens).max()
        # Another kernel rounds to bfloat16 at other places, so a logit may round to the neighbour of what it was. The
        # log-probability changes at most by what the token's own logit and the likely others change.
        allowed = 2 * spacing(float(largest))
        for one, other in zip(events, others, strict=True):
            assert abs(one.logprob - other.logprob) < allowed
            if one.token_id != other.token_id:
                break  # two tokens were about as likely


def spacing(value):
    """Return the distance between two neighbours of bfloat16, which has 8 significant bits."""
    return 2.0 ** (math.frexp(value)[1] - 8)
