"""Layers that read the keys of others compute of a prompt only the tokens whose logits are wanted."""

import numpy as np
import pytest
import torch

from benchmarks.local_engine import LocalEngine
from model.checkpoint.config import ModelConfig
from model.executors.columns import Bucket
from model.executors.layers import forward as layers
from model.executors.step import StepInput, wanted_rows
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from tests.engine.runner import test_adapters
from tests.engine.runner.test_adapters import Served
from tests.model.adapters import peft_adapters
from tests.model.adapters.peft_adapters import all_linear
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.oracle import generated

PROMPT = list(range(3, 43))


def test_each_wanted_token_is_the_last_one_of_a_sequence_of_its_own():
    bucket = Bucket(rows=3, queries=2, prompt_tokens=8, prompt_seqs=2, columns=3, num_logits=6)
    step = StepInput(bucket, 4, torch.device("cpu"))
    host = step.host
    # Two decode rows with two tokens and one, an unused one, and chunks of three and four tokens.
    host.cu_seqlens[:] = [0, 2, 3, 3]
    host.seq_lens[:] = [9, 5, 0]
    host.block_table[:] = [[1, 2, 3], [4, 5, 0], [0, 0, 0]]
    host.prompt_cu_seqlens[:] = [0, 3, 7]
    host.prompt_seq_lens[:] = [3, 12]
    host.prompt_block_table[:] = [[6, 0, 0], [7, 8, 9]]
    host.positions[:3] = [7, 8, 4]
    host.positions[6:13] = [0, 1, 2, 8, 9, 10, 11]
    host.logits_rows[:] = [0, 1, 2, 8, 12, 0]
    host.logits_rows[5] = 5  # of no sequence

    found = wanted_rows(step)

    assert found.cu_seqlens_q.tolist() == list(range(7))
    assert found.seq_lens.tolist() == [8, 9, 5, 3, 12, 0]
    tables = [[1, 2, 3], [1, 2, 3], [4, 5, 0], [6, 0, 0], [7, 8, 9]]
    assert found.block_table[:5].tolist() == tables
    assert (found.num_tokens, found.max_seqlen_q, found.max_seqlen_k) == (6, 1, 12)
    assert found.seq_lens.dtype is found.block_table.dtype is torch.int32


@pytest.fixture(scope="module", params=["gemma4", "gemma3n"])
def served(request, tmp_path_factory):
    """A checkpoint, and the model in transformers."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, CASES[request.param].save(folder)


@pytest.fixture
def computed(monkeypatch):
    """The index of each layer that is computed, and the number of its tokens."""
    found, forward = [], layers.layer_forward

    def recording(index, layer, residual, contexts):
        found.append((index, residual.hidden.shape[-2]))
        return forward(index, layer, residual, contexts)

    monkeypatch.setattr(layers, "layer_forward", recording)
    return found


def generate(folder, budget, **sampling):
    engine = LocalEngine(
        EngineConfig(
            model_path=str(folder),
            model_id="tiny",
            device="cpu",
            dtype="float32",
            cpu_threads=1,
            block_size=4,
            kv_cache_tokens=512,
            max_num_batched_tokens=budget,
            quantization="none",
        )
    )
    values = SamplingParams(max_new_tokens=8, temperature=0.0, **sampling)
    request = GenerateRequest(request_id=0, prompt_token_ids=PROMPT, sampling=values)
    (events,) = engine.generate([request])
    return [event.token_id for event in events]


def steps(computed):
    """Return the numbers of tokens of the layers of each step."""
    starts = [at for at, (index, _) in enumerate(computed) if index == 0]
    return [part[:, 1].tolist() for part in np.split(np.array(computed), starts[1:])]


def test_the_last_layers_compute_only_the_last_token_of_a_prompt(served, computed):
    folder, oracle = served
    network = ModelConfig.from_folder(folder).network
    first, count = network.num_writing, len(network.layers)
    assert first < count

    found = generate(folder, 16)

    assert found == generated(oracle, PROMPT, 8).tokens
    of_prompt = [it for it in steps(computed) if it[0] > 1]
    assert sum(it[0] for it in of_prompt) >= len(PROMPT)
    for tokens in of_prompt:
        assert len(set(tokens[:first])) == 1
        # A chunk that is not the last one has no logits.
        assert tokens[first:] in ([], [1] * (count - first))
    assert {len(it) for it in of_prompt} == {first, count}


def test_scored_prompts_are_computed_by_all_layers(served, computed):
    folder, _ = served
    network = ModelConfig.from_folder(folder).network

    generate(folder, 64, prompt_logprobs=True)

    whole = [it for it in steps(computed) if it[-1] >= len(PROMPT)]
    assert whole
    assert all(it == [it[0]] * len(network.layers) for it in whole)


@pytest.mark.parametrize("case", ["gemma4", "gemma3n"])
def test_prompts_with_adapters_have_the_tokens_of_peft(case, tmp_path, monkeypatch):
    linear = (*all_linear(), "per_layer_input_gate", "per_layer_projection")
    targets = [*linear, "linear_left", "linear_right"] if case == "gemma3n" else [*linear]
    monkeypatch.setattr(peft_adapters, "all_linear", lambda: targets)
    monkeypatch.setattr(test_adapters, "NAMES", ("a",))
    served = Served(tmp_path, CASES[case])
    engine = served.engine(max_num_batched_tokens=16)
    asked = [served.request(i, PROMPT[i:], name) for i, name in enumerate((None, "a", None))]

    answers = engine.generate(asked)

    for i, name in enumerate((None, "a", None)):
        expected = generated(served.models[name], PROMPT[i:], 12).tokens
        assert [event.token_id for event in answers[i]] == expected
