"""Reference implementations of all operations, written from their formulas, for tests of the kernels.

They are slow and serve as definitions. Each function computes in `dtype`: float32 as the truth for half
precision, float64 as the truth for float32, and the problem's own dtype to measure the error of that
precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the attention of one sequence's last m tokens to all of its n.

    Args:
        q: [m, H, D], the last m tokens.
        k: [n, K, D]; if n < m, the first queries have nothing to attend to.
        v: [n, K, D].
        softmax_scale: factor on the scores.
        sliding_window: tokens that a query attends to, itself included; None for all.
        softcap: c in c * tanh(score / c); None for none.
        causal: whether a query sees no key after its own token.
        dtype: to compute in.

    Returns:
        [m, H, D] in `dtype`; rows with nothing to attend to are 0.

    Source: Vaswani et al., Attention Is All You Need, 2017, eq. 1; the softcap is Gemma 2's.
    """
    scores = _scores(
        q,
        k,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        softcap=softcap,
        causal=causal,
        dtype=dtype,
    )
    values = v.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    # Values that no query sees may be NaN, and NaN times a weight of 0 is NaN.
    unseen = (scores == float("-inf")).all(dim=1)
    values = values.masked_fill(unseen.T[:, :, None], 0.0)
    sees_nothing = (scores == float("-inf")).all(dim=-1, keepdim=True)
    weights = scores.softmax(dim=-1).masked_fill(sees_nothing, 0.0)
    return torch.einsum("hmn,nhd->mhd", weights, values)


def log_sum_exp(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Compute the natural logarithm of the sum of exponentials of the scores in `attention`.

    Args:
        q: as in `attention`, as are the other arguments.
        k: likewise.
        softmax_scale: likewise.
        sliding_window: likewise.
        softcap: likewise.
        causal: likewise.
        dtype: likewise.

    Returns:
        [m, H] in `dtype`; -inf with nothing to attend to.
    """
    scores = _scores(
        q,
        k,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        softcap=softcap,
        causal=causal,
        dtype=dtype,
    )
    return scores.logsumexp(dim=-1).T


def _scores(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None,
    causal: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return the scores [H, m, n], -inf where a query does not see a key."""
    keys = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("mhd,nhd->hmn", q.to(dtype), keys) * softmax_scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query_position = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    key_position = torch.arange(k.shape[0], device=q.device)[None, :]
    hidden = torch.zeros_like(scores[0], dtype=torch.bool)
    if causal:
        hidden |= key_position > query_position
    if sliding_window is not None:
        hidden |= key_position <= query_position - sliding_window
    return scores.masked_fill(hidden, float("-inf"))


def write_kv(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: list[int]) -> Tensor:
    """Return a copy of kv [2, N, S, K, D] with k and v [T, K, D] at their slots; slot -1 skips a token."""
    written = kv.clone()
    block_size = kv.shape[2]
    for token, slot in enumerate(slot_mapping):
        if slot >= 0:
            written[0, slot // block_size, slot % block_size] = k[token]
            written[1, slot // block_size, slot % block_size] = v[token]
    return written


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., D] to float8_e4m3fn with a float32 scale for each row, so that its largest magnitude is 448.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, table 1 for the largest number.
    """
    largest = x.float().abs().amax(dim=-1)
    scale = torch.where(largest < 2.0**-100, 1.0, largest / 448)
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def quantize_kv(x: Tensor) -> tuple[Tensor, Tensor]:
    """Like `quantize`, with the smallest power of two per row that leaves no magnitude above 448."""
    largest = x.float().abs().amax(dim=-1).nan_to_num(0.0, torch.inf).clamp(min=2.0**-100).double()
    scale = torch.exp2(torch.ceil(torch.log2(largest / 448))).float()
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def dequantize(numbers: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiply float8 numbers [..., D] by the scales [...] of their rows."""
    return numbers.to(dtype) * scale[..., None].to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Divide x [..., C] by its root mean square and multiply by weight [C].

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, eq. 4.
    """
    wide = x.to(dtype)
    return wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * weight.to(dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Shift and scale x [..., C] to mean 0 and variance 1, multiply by weight [C] and add bias [C].

    Source: Ba et al., Layer Normalization, 2016, eq. 4.
    """
    wide = x.to(dtype)
    centered = wide - wide.mean(dim=-1, keepdim=True)
    scaled = centered / torch.sqrt((centered * centered).mean(dim=-1, keepdim=True) + eps)
    return scaled * weight.to(dtype) + bias.to(dtype)


def activation(x: Tensor, function: str) -> Tensor:
    """Apply "silu", "gelu", "gelu_tanh", "relu" or "relu2" to every element.

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, section 2, for both forms of GELU.
    """
    if function == "silu":
        return x * torch.sigmoid(x)
    if function == "relu":
        return torch.where(x > 0, x, 0.0)
    if function == "relu2":
        return torch.where(x > 0, x * x, 0.0)
    if function == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    assert function == "gelu_tanh"
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


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
