"""Tokens are compared up to a tie, and one that is clearly less likely is found."""

import pytest
import torch

from benchmarks.local_engine import LocalEngine
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from tests.model.executors.float32_model import TIE, Float32Model, assert_same_before_ties
from tests.tiny_checkpoint import write_tiny_checkpoint


class Rows:
    """Logits of three tokens, the same at each position."""

    def __init__(self, *row):
        self._row = row

    def logits(self, _prompt, tokens):
        return torch.tensor([self._row] * len(tokens))


NEAR_TIE = Rows(-1.0, -1.0 - TIE / 2, -9.0)


def test_tokens_may_differ_from_a_tie_on():
    for found in ([0, 0, 0], [0, 1, 2]):
        assert_same_before_ties(NEAR_TIE, [[5]], [found], [[0, 0, 0]])


def test_tokens_that_are_less_likely_or_missing_are_found():
    for found in ([0, 2, 0], [2, 1, 0], [0, 0]):
        for ours, theirs in ((found, [0, 0, 0]), ([0, 0, 0], found)):
            with pytest.raises(AssertionError):
                assert_same_before_ties(NEAR_TIE, [[5]], [ours], [theirs])


def test_logits_are_those_of_an_engine(tmp_path):
    folder = write_tiny_checkpoint(tmp_path)
    config = EngineConfig(
        model_path=str(folder), model_id="tiny", device="cpu", dtype="float32", kv_cache_tokens=256
    )
    prompt = [7, 8, 9]
    sampling = SamplingParams(max_new_tokens=9, temperature=0.0, logprobs=True)
    (events,) = LocalEngine(config).generate(
        [GenerateRequest(request_id=0, prompt_token_ids=prompt, sampling=sampling)]
    )
    tokens = [event.token_id for event in events]

    rows = Float32Model(folder).logits(prompt, tokens).log_softmax(-1)

    assert rows.argmax(-1).tolist() == tokens
    own = rows[range(len(tokens)), tokens]
    torch.testing.assert_close(own, torch.tensor([it.logprob for it in events]), rtol=0, atol=1e-4)
