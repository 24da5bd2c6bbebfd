"""Compares the whole model with transformers, for every family and variant."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.hub.resolve import BUNDLED, resolve
from model.text.tokenizer import Tokenizer
from tests.kernels.references.problems import assert_no_worse_than
from tests.marks import slow_except
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE
from tests.model.executors.paged import greedy, logits_in_chunks
from tests.model.oracle import generated

STEPS = 200
PROMPT = list(range(3, 100, 4))
TOLERANCE = 1e-4
TEXTS = ["def fibonacci(n):\n", "import os\n", "class Stack:\n    def __init__(self):\n"]


# They differ from a fast case in how they are stored, or in one part that another case has.
VARIANTS = {
    "gemma2 untied", "gemma3 by pattern", "gpt2 sharded", "gpt2 untied", "opt untied", "opt without biases",
}  # fmt: skip
PARAMS = [
    pytest.param(case, id=name, marks=pytest.mark.slow if name in VARIANTS else ())
    for name, case in CASES.items()
]


@pytest.fixture(scope="module", params=PARAMS)
def pair(request, tmp_path_factory):
    """One checkpoint, built by transformers and loaded by this project."""
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle = request.param.save(folder)
    config = ModelConfig.from_folder(folder)
    return oracle, load_model(folder, config, torch.float32, "cpu")


@pytest.fixture(scope="module")
def bundled_pair():
    """The bundled model in transformers (float32), the served model, and the tokenizer."""
    folder = resolve(BUNDLED)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(folder, ModelConfig.from_folder(folder), torch.float32, "cpu")
    return oracle, model, Tokenizer.from_folder(folder)


def tokens(length):
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def oracle_logits(oracle, ids):
    with torch.inference_mode():
        return oracle(torch.tensor([ids])).logits[0]


def assert_close(ours, theirs):
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def test_a_dense_forward_pass_matches_the_logits_of_transformers(pair):
    oracle, model = pair
    if any(it.softcap is not None for it in model.network.attentions):
        pytest.skip("dense attention, which is for training, caps no scores")
    ids = tokens(150)

    with torch.inference_mode():
        ours = model.logits(model(torch.tensor([ids]), torch.arange(len(ids))))[0]

    assert_close(ours, oracle_logits(oracle, ids))


@pytest.mark.parametrize("chunk", [100, 33, 1], ids=["at once", "in chunks", "token by token"])
def test_a_paged_forward_pass_matches_the_logits_of_transformers(pair, chunk):
    oracle, model = pair
    ids = tokens(100)

    ours = logits_in_chunks(model, ids, chunk)

    assert_close(ours, oracle_logits(oracle, ids))


def test_greedy_generation_matches_the_tokens_of_transformers(pair):
    oracle, model = pair

    ours, our_logits = greedy(model, PROMPT, STEPS)

    theirs = generated(oracle, PROMPT, STEPS)
    assert ours == theirs.tokens
    assert_close(our_logits, theirs.logits)


@pytest.mark.parametrize("name", ["phi3 longrope", "phi3 partial longrope tied"])
def test_a_longrope_service_within_the_original_context_matches_transformers(name, tmp_path):
    changes = CASES[name].changes | {"original_max_position_embeddings": 300}
    case = dataclasses.replace(CASES[name], changes=changes)
    oracle = case.save(tmp_path)
    model = load_model(tmp_path, ModelConfig.from_folder(tmp_path), torch.float32, "cpu")
    model.reserve_positions(300)

    ours, our_logits = greedy(model, PROMPT, STEPS)

    theirs = generated(oracle, PROMPT, STEPS)
    assert ours == theirs.tokens
    assert_close(our_logits, theirs.logits)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.in_half])
def test_logits_in_bfloat16_are_as_exact_as_those_of_transformers(name, tmp_path):
    oracle = CASES[name].save(tmp_path)
    model = load_model(tmp_path, ModelConfig.from_folder(tmp_path), torch.bfloat16, "cpu")
    ids = tokens(60)

    ours, truth = logits_in_chunks(model, ids, 17), oracle_logits(oracle, ids)

    assert ours.dtype is torch.bfloat16
    theirs = oracle_logits(oracle.bfloat16(), ids)
    assert_no_worse_than(ours, truth, theirs)


@pytest.mark.parametrize("text", slow_except(TEXTS[:1], TEXTS))
def test_the_bundled_model_matches_the_logits_and_tokens_of_transformers(bundled_pair, text):
    oracle, model, tokenizer = bundled_pair
    prompt = tokenizer.encode(text)

    assert_close(logits_in_chunks(model, prompt, 4), oracle_logits(oracle, prompt))
    ours, _ = greedy(model, prompt, STEPS)
    assert ours == generated(oracle, prompt, STEPS).tokens
