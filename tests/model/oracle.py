"""What transformers generates, the reference of whole models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Generated(NamedTuple):
    """A greedy continuation.

    Attributes:
        tokens: the ids.
        logits: [tokens, V] float32, before each of them.
    """

    tokens: list[int]
    logits: Tensor

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities of the tokens."""
        ids = torch.tensor(self.tokens)[:, None]
        values: list[float] = self.logits.log_softmax(-1).gather(1, ids)[:, 0].tolist()
        return values


def generated(oracle: Any, prompt: Sequence[int], count: int) -> Generated:
    """Continue a prompt by `count` tokens, past the end of the text too."""
    ids, config = torch.tensor([list(prompt)]), oracle.generation_config
    ends, config.eos_token_id = config.eos_token_id, None
    try:
        with torch.inference_mode():
            out = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                repetition_penalty=1.0,
                max_new_tokens=count,
                return_dict_in_generate=True,
                output_logits=True,
            )
    finally:
        config.eos_token_id = ends
    return Generated(out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float())
