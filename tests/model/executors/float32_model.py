"""Logits in float32 on a CPU: the truth about tokens of engines that round more, or add up in other orders."""

import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from tests.model.executors.paged import BLOCK_SIZE, PagedDriver

TIE = 2e-4
"""Difference up to which two tokens are about as likely in float32: twice the tolerance of a log-probability
(`tests/gpu/test_recordings_gpu.py`), since each of the two may be off by that."""


class Float32Model:
    """A checkpoint in float32 on the CPU, whose steps have one sequence."""

    def __init__(self, folder):
        config = ModelConfig.from_folder(folder)
        self._model = load_model(folder, config, torch.float32, "cpu")

    def logits(self, prompt, tokens):
        """Return the logits [len(tokens), V] from which each token of a reply was chosen."""
        whole = [*prompt, *tokens]
        driver = PagedDriver(self._model, num_blocks=-(-len(whole) // BLOCK_SIZE))
        return driver.step({0: whole})[0][len(prompt) - 1 : -1]


def assert_same_before_ties(model, prompts, found, expected):
    """Assert that greedy tokens are equal, up to one where two tokens are about as likely.

    A step with another number of rows may add up products in another order, which decides between the two. The tokens
    after such a tie have other contexts, and are not compared.

    Args:
        model: has a `logits` like that of `Float32Model`.
        prompts: of the sequences.
        found: tokens of each sequence.
        expected: likewise, as many.
    """
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        assert len(ours) == len(theirs)
        at = next(
            (i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1), None
        )
        if at is None:
            continue
        row = model.logits(prompt, theirs[: at + 1])[-1]
        gaps = [float(row.max() - row[it[at]]) for it in (ours, theirs)]
        assert max(gaps) < TIE, (
            f"token {at}: {ours[at]} instead of {theirs[at]}, less likely than the best by {gaps}"
        )
