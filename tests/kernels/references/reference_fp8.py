"""FP8 (e4m3) attention in PyTorch, to measure the error of each way of rounding.

    per_tensor      one scale each for all queries, all keys and all values: the simplest way, as a baseline
    tile_scaled     the steps of `hopper_fp8_prefill` over an FP8 cache, rounded where it rounds
    score_units     the granularity of Hopper's tensor cores in the sum of an FP8 score

The first two compute sums in `dtype`, without the errors of an accumulator.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
"""The largest number of e4m3."""
_PRODUCTS = 32
TERMS = _PRODUCTS + 1
"""Terms that one matrix instruction adds: the products and the sum so far."""
_KEPT = 13
"""Binary digits of a term that the sum keeps, counted after the first digit of the largest term."""
_MOST_PRODUCTS = 1 << 25
"""Products in memory at a time."""


def dequantize_rows(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply rows [..., D] by their scales [...] in float32, and convert the result to `dtype`."""
    return (numbers.float() * scale[..., None]).to(dtype)


def per_tensor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Compute attention with one scale per tensor; attention weights, at most 1, are rounded to e4m3.

    Args:
        q: [m, H, D], the last m tokens of a sequence.
        k: [n, K, D].
        v: [n, K, D].
        softmax_scale: factor on the scores.
        causal: whether a query sees no key after its own token.
        dtype: to compute in.

    Returns:
        [m, H, D] in `dtype`; rows with nothing to attend to are 0.
    """
    q, k, v = (_scaled(x.to(dtype), x.abs().amax().to(dtype)) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("mhd,nhd->hmn", q, keys) * softmax_scale
    s.masked_fill_(_hidden(q.shape[0], k.shape[0], 0, k.shape[0], causal, q), float("-inf"))
    e = torch.exp(s - _base(s.amax(-1, keepdim=True)))
    out = torch.einsum("hmn,nhd->hmd", to_e4m3(e), values)
    return (out / _divisor(e.sum(-1, keepdim=True))).transpose(0, 1)


def tile_scaled(
    q: Tensor,
    k: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
    *,
    softmax_scale: float,
    causal: bool = True,
    tile: int = 128,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Compute attention with a scale per query, and with the largest scale of each tile of keys and of values.

    Tiles are visited from the last to the first; weights are rounded after scaling the largest so far
    to 448.

    Args:
        q: [m, H, D], the last m tokens of a sequence.
        k: [n, K, D] float8_e4m3fn, n above 0, and the scales [n, K].
        v: likewise.
        softmax_scale: factor on the scores.
        causal: whether a query sees no key after its own token.
        tile: keys per tile.
        dtype: to compute in.

    Returns:
        Output [m, H, D] and log-sum-exp [m, H] in `dtype`; 0 and -inf with nothing to attend to.
    """
    rows = q.to(dtype)
    rows = _scaled(rows, rows.abs().amax(-1, keepdim=True)).transpose(0, 1)
    keys, values = (_with_scales_of_tiles(*x, tile, dtype) for x in (k, v))
    num_keys, group = keys.shape[0], q.shape[1] // keys.shape[1]
    m = torch.full((*rows.shape[:2], 1), float("-inf"), dtype=dtype, device=q.device)
    total, acc = torch.zeros_like(m), torch.zeros_like(rows)
    for first in reversed(range(0, num_keys, tile)):
        stop = min(first + tile, num_keys)
        some = keys[first:stop].repeat_interleave(group, 1)
        s = torch.einsum("hmd,nhd->hmn", rows, some) * softmax_scale
        hidden = _hidden(q.shape[0], num_keys, first, stop, causal, q)
        s.masked_fill_(hidden, float("-inf"))
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        e, fade = torch.exp(s - _base(new)), torch.exp(m - _base(new))
        weights = to_e4m3(e * LARGEST) / LARGEST
        some = values[first:stop].repeat_interleave(group, 1)
        total = total * fade + e.sum(-1, keepdim=True)
        acc = acc * fade + torch.einsum("hmn,nhd->hmd", weights, some)
        m = new
    lse = (m + torch.log(total)).squeeze(-1)
    return (acc / _divisor(total)).transpose(0, 1), lse.T


def score_units(q: Tensor, k: Tensor) -> Tensor:
    """Compute the granularity with which Hopper's tensor cores sum the scores of FP8 queries and keys.

    Each instruction adds `TERMS` terms, 32 products and the sum so far, and truncates each term to a multiple of a
    unit: 2^-13 of the power of two in the largest term. Truncated terms have either sign, so the error grows like a
    random walk: it is mostly below sqrt(TERMS) units, since a term loses less than one unit.

    Args:
        q: [..., m, D] float32 with e4m3 values; D is a multiple of 32.
        k: [..., n, D], likewise.

    Returns:
        The sum of each score's units, [..., m, n] float32.

    Source: "DeepSeek-V3 Technical Report", 2024, section 3.5.2, for the truncation; Zhang et al.,
    "SageAttention2", 2024, for the 13 digits.
    """
    rows = max(1, _MOST_PRODUCTS // (k[..., 0].numel() * _PRODUCTS))
    return torch.cat([_units_of_rows(part, k) for part in torch.split(q, rows, -2)], -2)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to the nearest e4m3 number, in the dtype of `x`; larger magnitudes are clamped to `LARGEST`."""
    # Rounds via float32, as the hardware does.
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype)


def _scaled(x: Tensor, largest: Tensor) -> Tensor:
    """Scale `x` so that `largest` becomes `LARGEST`, round to e4m3, and scale back."""
    scale = largest.clamp(min=1e-12) / LARGEST
    return to_e4m3(x / scale) * scale


def _units_of_rows(q: Tensor, k: Tensor) -> Tensor:
    """Compute `score_units` for all rows at once."""
    total = torch.zeros((), device=q.device)
    units = torch.zeros((), device=q.device)
    for first in range(0, q.shape[-1], _PRODUCTS):
        part = slice(first, first + _PRODUCTS)
        products = q[..., :, None, part] * k[..., None, :, part]
        before, total = total, total + products.sum(-1)
        largest = torch.maximum(products.abs().amax(-1), torch.maximum(before.abs(), total.abs()))
        # If all terms are 0, the sign is 0, and so is the unit.
        units = units + torch.ldexp(largest.sign(), largest.frexp().exponent - 1 - _KEPT)
    return units


def _with_scales_of_tiles(numbers: Tensor, scale: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """Round rows [n, K, D] to e4m3 with the largest of their tile's scales; return them multiplied by it."""
    own = scale.to(dtype)[..., None]
    common = torch.cat(
        [part.amax(0, keepdim=True).expand_as(part) for part in torch.split(own, tile)]
    )
    return to_e4m3(numbers.to(dtype) * (own / common)) * common


def _hidden(m: int, n: int, first: int, stop: int, causal: bool, like: Tensor) -> Tensor:
    """Return a mask of the keys from `first` to `stop` of n that the last m queries do not see, [m, stop - first]."""
    key = torch.arange(first, stop, device=like.device)[None, :]
    position = torch.arange(n - m, n, device=like.device)[:, None]
    return key > position if causal else torch.zeros_like(key > position)


def _base(largest: Tensor) -> Tensor:
    """Replace the maximum of rows that see no key by 0, since -inf - -inf is NaN."""
    return largest.masked_fill(largest == float("-inf"), 0.0)


def _divisor(total: Tensor) -> Tensor:
    return total.masked_fill(total == 0, 1.0)
