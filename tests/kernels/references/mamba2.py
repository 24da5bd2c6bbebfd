"""Gated short convolution and Mamba-2 of one sequence, token by token; see `tests.kernels.references.reference`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.problem import Mamba2Shape, RecurrentWeights, ShortConvShape


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
    b, c, x = projected.to(dtype).split(shape.channels, -1)
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
    assert weights.a_log is not None
    assert weights.dt_bias is not None
    assert weights.d is not None
    heads, groups, of_groups = shape.num_heads, shape.num_groups, shape.num_groups * shape.state_dim
    z, mixed, dt = projected.to(dtype).split((shape.inner, shape.channels, heads), -1)
    total, conv_state = convolve(mixed, weights, states[0])
    x, b, c = functional.silu(total).split((shape.inner, of_groups, of_groups), -1)
    x = x.unflatten(-1, (heads, shape.head_dim))
    b, c = (
        it.unflatten(-1, (groups, shape.state_dim)).repeat_interleave(heads // groups, -2)
        for it in (b, c)
    )
    d = functional.softplus(dt + weights.dt_bias.to(dtype)).clamp(*shape.dt_limits)
    decay = torch.exp(-weights.a_log.to(dtype).exp() * d)
    state, outs = states[1].to(dtype), []
    for t in range(len(projected)):
        added = (d[t][:, None] * x[t])[:, :, None] * b[t][:, None]
        state = decay[t][:, None, None] * state + added
        outs.append((state * c[t][:, None]).sum(-1) + weights.d.to(dtype)[:, None] * x[t])
    y, gate = torch.stack(outs).flatten(1), functional.silu(z)
    if weights.norm is not None:
        y = y if shape.norm_before_gate else y * gate
        parts = y.unflatten(-1, (groups, -1))
        parts = parts * (parts.square().mean(-1, keepdim=True) + shape.eps).rsqrt()
        y = parts.flatten(1) * weights.norm.to(dtype)
    if weights.norm is None or shape.norm_before_gate:
        y = y * gate
    return Found(y, (conv_state, state))
