"""The gated delta rule of one sequence, token by token; see `tests.kernels.references.reference`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.problem import CHUNK, GatedDeltaShape, RecurrentWeights


class Found(NamedTuple):
    """What the tokens of a sequence give, in the dtype of the computation.

    Attributes:
        out: [L, inner].
        conv_state: [W - 1, channels], after the last token.
        state: [H, key_dim, value_dim], after the last token.
    """

    out: Tensor
    conv_state: Tensor
    state: Tensor


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
    conv_state: Tensor,
    state: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Found:
    """Compute the formula of `GatedDeltaShape`.

    Args:
        shape: of the mixer.
        weights: of the mixer.
        projected: [L, channels + inner].
        gates: [L, 2 * H].
        conv_state: [W - 1, channels], before the first token.
        state: [H, key_dim, value_dim], before the first token.
        dtype: to compute in.
    """
    inputs = torch.cat((conv_state.to(dtype), projected[:, : shape.channels].to(dtype)))
    q, k, v, g, beta = _heads(shape, weights, inputs, gates.to(dtype))
    state = state.to(dtype)
    outs = []
    for t in range(len(projected)):
        state = g[t].exp()[:, None, None] * state
        read = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - read))[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    out = _finish(shape, weights, torch.stack(outs), projected[:, shape.channels :].to(dtype))
    return Found(out, inputs[len(projected) :], state)


def gated_delta_blocks(
    shape: GatedDeltaShape,
    weights: RecurrentWeights,
    projected: Tensor,
    gates: Tensor,
    conv_state: Tensor,
    state: Tensor,
    dtype: torch.dtype,
) -> Found:
    """Compute blocks of `CHUNK` tokens in float32, with operands of products and intermediate results in `dtype`.

    This is what the field computes in half precision. The arguments are those of `gated_delta`.

    Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024 (arXiv 2406.06484), eq. 8 to 11.
    """

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    inputs = torch.cat((conv_state.float(), projected[:, : shape.channels].float()))
    heads = _heads(shape, weights, inputs, gates.float())
    q, k, v, g, beta = (it.transpose(0, 1) for it in heads)
    q, k, v = rounded(q), rounded(k), rounded(v)
    state = state.float()
    outs = []
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
    out = _finish(shape, weights, out, projected[:, shape.channels :].float())
    return Found(out, inputs[len(projected) :], state)


def _heads(
    shape: GatedDeltaShape, weights: RecurrentWeights, inputs: Tensor, gates: Tensor
) -> _Heads:
    """Convolve the inputs, those of the state included, [W - 1 + L, channels], and split them into heads."""
    assert weights.a_log is not None
    assert weights.dt_bias is not None
    dtype = inputs.dtype
    heads, groups, size = shape.num_heads, shape.num_key_heads, shape.key_dim
    total = (inputs.unfold(0, shape.width, 1) * weights.conv.to(dtype)).sum(-1)
    if weights.conv_bias is not None:
        total = total + weights.conv_bias.to(dtype)
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
