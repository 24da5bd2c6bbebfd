"""Gated short convolution and Mamba-2 of one sequence, token by token; see `tests.kernels.references.reference`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.problem import CHUNK, Mamba2Shape, RecurrentWeights, ShortConvShape


class Found(NamedTuple):
    """What the tokens of a sequence give, in the dtype of the computation.

    Attributes:
        out: [L, inner].
        states: after the last token, as the shape lists them.
    """

    out: Tensor
    states: tuple[Tensor, ...]


def convolve(x: Tensor, weights: RecurrentWeights, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the causal convolution of [L, channels] after the inputs [W - 1, channels], and the last W - 1 inputs."""
    inputs = torch.cat((state.to(x.dtype), x))
    total = (inputs.unfold(0, len(state) + 1, 1) * weights.conv.to(x.dtype)).sum(-1)
    if weights.conv_bias is not None:
        total = total + weights.conv_bias.to(x.dtype)
    return total, inputs[len(x) :]


def short_conv(
    shape: ShortConvShape,
    weights: RecurrentWeights,
    projected: Tensor,
    states: tuple[Tensor, ...],
    dtype: torch.dtype = torch.float64,
) -> Found:
    """Compute the formula of `ShortConvShape`.

    Args:
        shape: of the mixer.
        weights: of the mixer.
        projected: [L, 3 * channels].
        states: before the first token.
        dtype: to compute in.
    """
    b, c, x = torch.split(projected.to(dtype), shape.channels, -1)
    total, state = convolve(b * x, weights, states[0])
    return Found(c * total, (state,))


def mamba2(
    shape: Mamba2Shape,
    weights: RecurrentWeights,
    projected: Tensor,
    states: tuple[Tensor, ...],
    dtype: torch.dtype = torch.float64,
) -> Found:
    """Compute the formula of `Mamba2Shape`; arguments as for `short_conv`, of [L, inner + channels + H]."""
    assert weights.d is not None
    it = _inputs(shape, weights, projected, states[0], dtype)
    decay, state, outs = it.logs.exp(), states[1].to(dtype), []
    for t in range(len(projected)):
        added = (it.d[t][:, None] * it.x[t])[:, :, None] * it.b[t][:, None]
        state = decay[t][:, None, None] * state + added
        outs.append((state * it.c[t][:, None]).sum(-1))
    y = torch.stack(outs) + weights.d.to(dtype)[:, None] * it.x
    return Found(_finish(shape, weights, y, it), (it.conv_state, state))


def mamba2_blocks(
    shape: Mamba2Shape,
    weights: RecurrentWeights,
    projected: Tensor,
    states: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> Found:
    """Compute blocks of `CHUNK` tokens in float32, rounding as kernels in `dtype` do.

    The factors of all products, and y before the gate, are rounded to that dtype.

    Source: Dao and Gu, Transformers are SSMs, 2024 (arXiv 2405.21060), section 6.
    """
    assert weights.d is not None
    it = _inputs(shape, weights, projected, states[0], torch.float32)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    it = it._replace(x=rounded(it.x), b=rounded(it.b), c=rounded(it.c))
    state, outs = states[1].float(), []
    for first in range(0, len(projected), CHUNK):
        x, b, c, d, logs = (part[first : first + CHUNK].transpose(0, 1) for part in it[:5])
        total = logs.double().cumsum(-1)
        later = torch.ones(2 * total.shape[-1:]).triu(1).bool()
        between = (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf)
        factors = rounded(c @ b.mT * between.exp().float() * d[:, None])
        y = c @ rounded(state).mT * total.exp().float()[..., None] + factors @ x
        remaining = (total[:, -1:] - total).exp().float() * d
        state = state * total[:, -1, None, None].exp().float()
        state = state + rounded(x * remaining[..., None]).mT @ b
        outs.append(y.transpose(0, 1))
    y = torch.cat(outs) + weights.d[:, None] * it.x
    return Found(_finish(shape, weights, rounded(y), it), (it.conv_state, state))


class _Inputs(NamedTuple):
    """Of a recurrence, [L, H, ...], and what else is known before it."""

    x: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    logs: Tensor
    z: Tensor
    conv_state: Tensor


def _inputs(
    shape: Mamba2Shape,
    weights: RecurrentWeights,
    projected: Tensor,
    state: Tensor,
    dtype: torch.dtype,
) -> _Inputs:
    assert weights.a_log is not None
    assert weights.dt_bias is not None
    heads, groups, of_groups = shape.num_heads, shape.num_groups, shape.num_groups * shape.state_dim
    z, mixed, dt = torch.split(projected.to(dtype), [shape.inner, shape.channels, heads], -1)
    total, conv_state = convolve(mixed, weights, state)
    x, b, c = torch.split(functional.silu(total), [shape.inner, of_groups, of_groups], -1)
    b, c = (
        torch.unflatten(it, -1, (groups, shape.state_dim)).repeat_interleave(heads // groups, -2)
        for it in (b, c)
    )
    d = functional.softplus(dt + weights.dt_bias.to(dtype)).clamp(*shape.dt_limits)
    logs = -weights.a_log.to(dtype).exp() * d
    return _Inputs(torch.unflatten(x, -1, (heads, shape.head_dim)), b, c, d, logs, z, conv_state)


def _finish(shape: Mamba2Shape, weights: RecurrentWeights, y: Tensor, it: _Inputs) -> Tensor:
    y, gate = y.flatten(1), functional.silu(it.z)
    if weights.norm is not None:
        assert shape.eps is not None
        y = y if shape.norm_before_gate else y * gate
        parts = torch.unflatten(y, -1, (shape.num_groups, -1))
        parts = parts * (parts.square().mean(-1, keepdim=True) + shape.eps).rsqrt()
        y = parts.flatten(1) * weights.norm.to(y.dtype)
    if weights.norm is None or shape.norm_before_gate:
        y = y * gate
    return y
