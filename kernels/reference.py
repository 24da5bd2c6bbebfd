"""Every op written from its formula, to measure the kernels against.

Slow, and plain enough to be read as the definition. Knows nothing of how a kernel works. Each function
computes in `dtype`: float32 for the truth of half precision, float64 for that of float32, and the
problem's own dtype to learn what error that precision brings along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.plan import AttentionProblem


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Causal attention of one sequence's last m tokens to all of its n.

    Args:
        q: [m, H, D], the last m tokens.
        k: [n, K, D], n at least m.
        v: [n, K, D].
        softmax_scale: factor on the scores.
        sliding_window: tokens that a query attends to, itself included; None for all.
        softcap: c in c * tanh(score / c); None for none.
        dtype: to compute in.

    Returns:
        [m, H, D] in `dtype`.

    Source: Vaswani et al., Attention Is All You Need, 2017, eq. 1; the softcap is Gemma 2's.
    """
    group = q.shape[1] // k.shape[1]
    queries = q.to(dtype)
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("mhd,nhd->hmn", queries, keys) * softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_position = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    key_position = torch.arange(k.shape[0], device=q.device)[None, :]
    visible = key_position <= query_position
    if sliding_window is not None:
        visible &= key_position > query_position - sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hmn,nhd->mhd", scores.softmax(dim=-1), values)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    block_table: list[list[int]],
    problem: AttentionProblem,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Attention of packed queries over the paged cache, one sequence after the other.

    Args:
        q: [T, H, D], the sequences' queries one after the other.
        kv: [2, N, S, K, D].
        query_lens: query tokens of each sequence.
        seq_lens: tokens in the cache of each sequence, its queries included.
        block_table: block ids of each sequence in order.
        problem: for its scale, window and softcap.
        dtype: as in `attention`.

    Returns:
        [T, H, D] in `dtype`; a sequence without tokens in the cache has rows of 0.
    """
    outputs = []
    row = 0
    for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_table, strict=True):
        queries = q[row : row + query_len]
        row += query_len
        if seq_len == 0:
            outputs.append(torch.zeros(queries.shape, dtype=dtype, device=q.device))
            continue
        keys, values = (
            torch.cat([side[block] for block in blocks])[:seq_len] for side in kv.unbind(0)
        )
        outputs.append(
            attention(
                queries,
                keys,
                values,
                softmax_scale=problem.softmax_scale,
                sliding_window=problem.sliding_window,
                softcap=problem.softcap,
                dtype=dtype,
            )
        )
    return torch.cat(outputs)


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: list[int]) -> Tensor:
    """Return kv [2, N, S, K, D] with k and v [T, K, D] at their slots; -1 leaves a token out."""
    written = kv.clone()
    block_size = kv.shape[2]
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            written[0, slot // block_size, slot % block_size] = k[token]
            written[1, slot // block_size, slot % block_size] = v[token]
    return written


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Divide x [..., C] by its root mean square and multiply by weight [C].

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, eq. 4.
    """
    wide = x.to(dtype)
    return wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * weight.to(dtype)


def apply_rope(x: Tensor, angles: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rotate the pair (x[i], x[i + D / 2]) of x [T, heads, D] by angles [T, D / 2].

    Source: Su et al., RoFormer, 2021, eq. 34, with the pairs half a head apart.
    """
    first, second = x.to(dtype).chunk(2, dim=-1)
    cos, sin = angles.to(dtype).cos()[:, None], angles.to(dtype).sin()[:, None]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def silu_and_mul(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiply the second half of x [..., 2 * F] by the first half times its sigmoid.

    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """
    gate, up = x.to(dtype).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
