"""Log-probabilities of given tokens under the unmodified logits of a model.

The log-probabilities of a row depend, bit for bit, on that row's logits alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.sampling.tokens import log_softmax

RANKING_ID_MASK = 0xFFFFFFFF
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


def prompt_top_tokens(logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the most likely tokens of each row, most likely first, equals by smaller id.

    Args:
        logits: [n, V], any floating dtype.
        count: tokens of each row, at least 1; at most V are returned.

    Returns:
        n lists of (token id, natural log-probability).
    """
    rows: list[list[tuple[int, float]]] = []
    # The keys of a block have twice the size of its logits.
    block = max(_BLOCK // 4 // logits.shape[1], 1)
    for i in range(0, len(logits), block):
        part = logits[i : i + block].detach().float()
        keys = ranking_keys(part.amax(-1, keepdim=True) - part)
        count = min(count, part.shape[1])
        top = keys.topk(count, dim=-1, largest=False, sorted=True).values & RANKING_ID_MASK
        found = log_softmax(part).gather(1, top)
        rows += [
            list(zip(ids, values, strict=True))
            for ids, values in zip(top.tolist(), found.tolist(), strict=True)
        ]
    return rows


def ranking_keys(distances: Tensor) -> Tensor:
    """Return int64 keys [R, V], all distinct, that order by distance [R, V] float32 >= 0, then by id.

    The bits of a non-negative float sort like the float; the id goes below them.
    """
    ids = torch.arange(distances.shape[1], device=distances.device)
    return (distances.view(torch.int32).long() << 32) | ids
