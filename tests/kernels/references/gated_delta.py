"""The gated delta rule of one sequence, token by token; see `tests.kernels.references.reference`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.problem import GatedDeltaShape, RecurrentWeights


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


def gated_delta(
    shape: GatedDeltaShape,
    weights: RecurrentWeights,
    projected: Tensor,
    gates: Tensor,
    conv_state: Tensor,
    state: Tensor,
    dtype: torch.dtype = torch.float64,
    rounding: torch.dtype | None = None,
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
        rounding: dtype to which the results of the convolution, beta, and the results of the rule before the norm are
            rounded, as by implementations from separate operations; None for none.
    """

    def rounded(x: Tensor) -> Tensor:
        return x if rounding is None else x.to(rounding).to(dtype)

    assert weights.a_log is not None
    assert weights.dt_bias is not None
    assert weights.norm is not None
    heads, groups, size = shape.num_heads, shape.num_key_heads, shape.key_dim
    mixed, z = torch.split(projected.to(dtype), [shape.channels, shape.inner], -1)
    inputs = torch.cat((conv_state.to(dtype), mixed))
    taps = inputs.unfold(0, shape.width, 1)
    total = (taps * weights.conv.to(dtype)).sum(-1)
    if weights.conv_bias is not None:
        total = total + weights.conv_bias.to(dtype)
    q, k, v = torch.split(functional.silu(total), [groups * size, groups * size, shape.inner], -1)
    q, k = (
        _unit(torch.unflatten(it, -1, (groups, size))).repeat_interleave(heads // groups, 1)
        for it in (q, k)
    )
    v = torch.unflatten(v, -1, (heads, shape.value_dim))
    b, a = gates.to(dtype).chunk(2, -1)
    g = -weights.a_log.to(dtype).exp() * functional.softplus(a + weights.dt_bias.to(dtype))
    beta, state = rounded(b.sigmoid()), state.to(dtype)
    outs = []
    for t in range(len(projected)):
        state = g[t].exp()[:, None, None] * state
        read = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + k[t][:, :, None] * (beta[t][:, None] * (v[t] - read))[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t] / size**0.5))
    out = rounded(torch.stack(outs))
    norm = (out.square().mean(-1, keepdim=True) + shape.eps).rsqrt()
    out = (out * norm * weights.norm.to(dtype)).flatten(1) * functional.silu(z)
    return Found(out, inputs[len(projected) :], state)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
