"""A sampled token hardly depends on rounding of the logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.sampling.sampler import Sampler
from tests.model.sampling.sampling_rows import sampling_row

NOISE = 2e-5
"""Standard deviation of the difference between the logits of a row alone and in a batch on a CPU."""


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.95}, {"top_k": 50}], ids=str)
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_rounding_of_the_logits_rarely_changes_a_token(filters, temperature) -> None:
    generator, count, vocab = np.random.default_rng(0), 500, 16384
    # As in a language model: the n-th token has about n^-1.2 of the weight of the first.
    logits = np.float32(-1.2 * np.log(generator.permutation(vocab) + 1.0))
    logits += generator.normal(0, 0.3, vocab).astype(np.float32)
    rows = [
        sampling_row(seed=i, position=i, temperature=temperature, **filters) for i in range(count)
    ]
    differing = 0
    for row in rows:
        noise = generator.normal(0, NOISE, vocab).astype(np.float32)
        one, other = (
            Sampler().forward(torch.from_numpy(values)[None], [row])[0].token_id
            for values in (logits, logits + noise)
        )
        differing += one != other

    # One token in 100,000 changes; one in 14 if one number is inverted through the cumulative distribution.
    assert differing <= 1
