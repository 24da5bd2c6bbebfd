"""Log-probabilities of given tokens under the unmodified logits of a model.

The log-probabilities of a row depend, bit for bit, on that row's logits alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling.tokens import log_softmax

# Elements of one float32 block of log-probabilities, which takes 64 MiB.
_BLOCK = 1 << 24


def prompt_logprobs(logits: Tensor, next_ids: Tensor | Sequence[int]) -> list[float]:
    """Return the natural log-probability of each given token under its row of logits.

    Args:
        logits: [n, V], any floating dtype.
        next_ids: [n] int64 or integers: the token that follows each row's position, in [0, V).

    Returns:
        n floats; NaN where the row's logits are not finite.
    """
    ids = torch.as_tensor(next_ids, dtype=torch.int64, device=logits.device)[:, None]
    assert len(ids) == len(logits), (len(ids), len(logits))
    block = max(_BLOCK // logits.shape[1], 1)
    chosen = [
        log_softmax(logits[i : i + block].detach().float()).gather(1, ids[i : i + block])
        for i in range(0, len(ids), block)
    ]
    return torch.cat(chosen)[:, 0].tolist() if chosen else []
