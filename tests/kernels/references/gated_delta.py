"""The gated delta rule of one sequence, token by token; see `tests.kernels.references.reference`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.problem import CHUNK, GatedDeltaShape, RecurrentWeights
from tests.kernels.references.mamba2 import Found, convolve


class _Heads(NamedTuple):
    """q and k [L, H, key_dim] of length 1, v [L, H, value_dim], logarithms of decays g and beta [L, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def gated_delta(
    shape: GatedDeltaShape,
    weights: RecurrentWeights,
    projected: Tensor,
    gates: Tensor,
    states: tuple[Tensor, ...],
    dtype: torch.dtype = torch.float64,
) -> Found:
    """Compute the formula of `GatedDeltaShape`.

    Args:
        shape: of the mixer.
        weights: of the mixer.
        projected: [L, channels + inner].
        gates: [L, 2 * H].
        states: before the first token, as the shape lists them.
        dtype: to compute in.
    """
    mixed, z = torch.split(projected.to(dtype), [shape.channels, shape.inner], -1)
    total, conv_state = convolve(mixed, weights, states[0])
    q, k, v, g, beta = _heads(shape, weights, total, gates.to(dtype))
    state, outs = states[1].to(dtype), []
    for t in range(len(projected)):
        state = g[t].exp()[:, None, None] * state
        read = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - read))[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return Found(_finish(shape, weights, torch.stack(outs), z), (conv_state, state))


def gated_delta_blocks(
    shape: GatedDeltaShape,
    weights: RecurrentWeights,
    projected: Tensor,
    gates: Tensor,
    states: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> Found:
    """Compute blocks of `CHUNK` tokens in float32, with operands of products and intermediate results in `dtype`.

    This is what the field computes in half precision. The arguments are those of `gated_delta`.

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024 (arXiv 2406.06484), eq. 8 to 11.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    mixed, z = torch.split(projected.float(), [shape.channels, shape.inner], -1)
    total, conv_state = convolve(mixed, weights, states[0])
    heads = _heads(shape, weights, total, gates.float())
    q, k, v, g, beta = (it.transpose(0, 1) for it in heads)
    q, k, v = rounded(q), rounded(k), rounded(v)
    state, outs = states[1].float(), []
    for first in range(0, len(projected), CHUNK):
        block = slice(first, first + CHUNK)
        keys, queries, step = k[:, block], q[:, block], beta[:, block, None]
        total = g[:, block].double().cumsum(1)
        between = (total[:, :, None] - total[:, None]).tril().exp().float().tril()
        decay = total.exp().float()[..., None]
        system = (step * (keys @ keys.mT) * between).tril(-1)
        one = torch.eye(system.shape[-1]).expand_as(system)
        inverse = rounded(
            torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
        )
        w = rounded(inverse @ rounded(step * decay * keys))
        new = rounded(inverse @ rounded(step * v[:, block])) - w @ rounded(state)
        scores = rounded((queries @ keys.mT) * between)
        outs.append(decay * (queries @ rounded(state)) + scores @ rounded(new))
        remaining = (total[:, -1:] - total).exp().float()[..., None]
        state = decay[:, -1:] * state + keys.mT @ rounded(remaining * new)
    out = rounded(torch.cat(outs, 1).transpose(0, 1))
    return Found(_finish(shape, weights, out, z), (conv_state, state))


def _heads(
    shape: GatedDeltaShape, weights: RecurrentWeights, total: Tensor, gates: Tensor
) -> _Heads:
    """Split the result of the convolution, [L, channels] before SiLU, into heads."""
    assert weights.a_log is not None
    assert weights.dt_bias is not None
    dtype = total.dtype
    heads, groups, size = shape.num_heads, shape.num_key_heads, shape.key_dim
    q, k, v = torch.split(functional.silu(total), [groups * size, groups * size, shape.inner], -1)
    q, k = (
        _unit(torch.unflatten(it, -1, (groups, size))).repeat_interleave(heads // groups, 1)
        for it in (q, k)
    )
    b, a = gates.chunk(2, -1)
    g = -weights.a_log.to(dtype).exp() * functional.softplus(a + weights.dt_bias.to(dtype))
    v = torch.unflatten(v, -1, (heads, shape.value_dim))
    return _Heads(q / size**0.5, k, v, g, b.sigmoid())


def _finish(shape: GatedDeltaShape, weights: RecurrentWeights, out: Tensor, z: Tensor) -> Tensor:
    """Normalize each head, [L, H, value_dim], and gate it; [L, inner]."""
    assert weights.norm is not None
    norm = (out.square().mean(-1, keepdim=True) + shape.eps).rsqrt()
    return (out * norm * weights.norm.to(out.dtype)).flatten(1) * functional.silu(z)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
