"""Mamba-2 in PyTorch: decode rows by the recurrence, prompts by blocks of `CHUNK` tokens.

Within a block, with l the cumulated logarithms of the decays, y_t = exp(l_t) h c_t + sum_s<=t (c_t . b_s)
exp(l_t - l_s) d_s x_s, and after it h = exp(l_end) h + sum_s exp(l_end - l_s) d_s x_s b_s^T, with h the state before
the block. Blocks begin at positions that are multiples of `CHUNK` and have that many rows, whether there are tokens or
not. They are multiplied one after the other, so that the bits of a token do not depend on how many a step has.

Source: Dao and Gu, Transformers are SSMs, 2024 (arXiv 2405.21060), section 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.problem import CHUNK
from kernels.recurrent.pytorch.convolution import causal_conv, dense_conv
from kernels.recurrent.pytorch.functions import silu, softplus
from kernels.recurrent.pytorch.slots import read_rows, write_rows

if TYPE_CHECKING:
    from kernels.recurrent.problem import Mamba2Shape, RecurrentWeights
    from kernels.recurrent.segments import Segments


class _Inputs(NamedTuple):
    """What the recurrence reads of each token, float32.

    Attributes:
        x: [..., H, P].
        b: [..., G, N].
        c: [..., G, N].
        d: [..., H], the step sizes.
        log_decay: [..., H].
    """

    x: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    log_decay: Tensor

    def tokens(self, first: int, end: int) -> _Inputs:
        """Return those of some tokens."""
        return _Inputs(*(it[first:end] for it in self))

    def padded(self, before: int, after: int) -> _Inputs:
        """Add tokens that change nothing before the first and after the last: of zeros, with decays of 1."""
        return _Inputs(
            *(functional.pad(it, (0, 0) * (it.dim() - 1) + (before, after)) for it in self)
        )


class Mamba2:
    """See `RecurrentKernel` and `kernels.recurrent.problem.Mamba2Shape`."""

    def __init__(self, shape: Mamba2Shape, weights: RecurrentWeights) -> None:
        self.shape, self.weights = shape, weights

    def __call__(
        self,
        projected: Tensor,
        _gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """Compute the tokens of a step, [T, inner]; see `RecurrentKernel`."""
        z, mixed, dt = self._split(projected)
        inputs = self._inputs(
            causal_conv(
                mixed, self.weights.conv, self.weights.conv_bias, states[0], segments, silu=True
            ),
            dt,
        )
        y = torch.empty_like(inputs.x)
        rows, state = segments.rows, states[1]
        if rows:
            read, write = segments.slots[:rows].unbind(1)
            y[:rows], new = _step(inputs.tokens(0, rows), read_rows(state, read))
            write_rows(state, write, new)
        for (first, end, source, target), start in zip(
            segments.bounds, segments.starts, strict=True
        ):
            if first == end:
                continue
            before = state[source] if source >= 0 else torch.zeros_like(state[0])
            y[first:end], after = _prompt(inputs.tokens(first, end), before, start % CHUNK)
            if target >= 0:
                state[target] = after
        return self._finish(y, inputs.x, z, projected.dtype)

    def dense(self, projected: Tensor, _gates: Tensor | None = None) -> Tensor:
        """Compute whole sequences from zero states, differentiably: [B, L, inner] of [B, L, ...]."""
        shape = self.shape
        z, mixed, dt = self._split(projected)
        inputs = self._inputs(
            dense_conv(mixed, self.weights.conv, self.weights.conv_bias, silu=True), dt
        )
        zeros = inputs.x.new_zeros(shape.num_heads, shape.head_dim, shape.state_dim)
        found = [_prompt(_Inputs(*it), zeros, 0)[0] for it in zip(*inputs, strict=True)]
        return self._finish(torch.stack(found), inputs.x, z, projected.dtype)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z, the inputs of the convolution and dt."""
        shape = self.shape
        z, mixed, dt = torch.split(projected, [shape.inner, shape.channels, shape.num_heads], -1)
        return z, mixed, dt

    def _inputs(self, mixed: Tensor, dt: Tensor) -> _Inputs:
        """Return the inputs of the recurrence from the results of the convolution, float32, and dt."""
        shape, weights = self.shape, self.weights
        assert weights.a_log is not None
        assert weights.dt_bias is not None
        of_groups = shape.num_groups * shape.state_dim
        x, b, c = torch.split(mixed, [shape.inner, of_groups, of_groups], -1)
        d = softplus(dt.float() + weights.dt_bias.float()).clamp(*shape.dt_limits)
        return _Inputs(
            torch.unflatten(x, -1, (shape.num_heads, shape.head_dim)),
            torch.unflatten(b, -1, (shape.num_groups, shape.state_dim)),
            torch.unflatten(c, -1, (shape.num_groups, shape.state_dim)),
            d,
            -torch.exp(weights.a_log.float()) * d,
        )

    def _finish(self, y: Tensor, x: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
        """Add the skip connection, gate and normalize: [..., inner] of `y` and `x`, [..., H, P], and `z`."""
        shape, weights = self.shape, self.weights
        assert weights.d is not None
        y = (y + weights.d.float()[:, None] * x).flatten(-2)
        gate = silu(z.float())
        if weights.norm is None or shape.eps is None:
            return (y * gate).to(dtype)
        if not shape.norm_before_gate:
            y = y * gate
        groups = torch.unflatten(y, -1, (shape.num_groups, -1))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + shape.eps)
        y = (groups * scale).flatten(-2) * weights.norm.float()
        return (y * gate if shape.norm_before_gate else y).to(dtype)


def _step(inputs: _Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token of each of R sequences from their states, [R, H, P, N], which are overwritten.

    Returns:
        y, [R, H, P] without the skip connection, and the states after.
    """
    x, b, c, d, log_decay = inputs
    rows, heads, groups = *d.shape, b.shape[1]
    # In place: a row of 64 heads of 64x128 on a busy host takes 21 ms and 992 page faults, otherwise 41 ms and 2528.
    parts = torch.unflatten(state, 1, (groups, heads // groups))
    parts.mul_(torch.exp(log_decay).view(rows, groups, -1, 1, 1))
    scaled = torch.unflatten(d[..., None] * x, 1, (groups, -1))
    parts.addcmul_(scaled[..., None], b[:, :, None, None])
    y = (parts * c[:, :, None, None]).sum(-1)
    return y.flatten(1, 2), parts.flatten(1, 2)


def _prompt(inputs: _Inputs, state: Tensor, begin: int) -> tuple[Tensor, Tensor]:
    """Compute L tokens of one sequence from its state, [H, P, N].

    Args:
        inputs: [L, ...] each.
        state: before the first token.
        begin: position of the first token in its block.

    Returns:
        y, [L, H, P] without the skip connection, and the state after.
    """
    length, heads, head_dim = inputs.x.shape
    groups, state_dim = inputs.b.shape[1:]
    padded = inputs.padded(begin, -(begin + length) % CHUNK)
    x, b, c, d, log_decay = (torch.unflatten(it, 0, (-1, CHUNK)) for it in padded)
    # [blocks, H, CHUNK], [blocks, G, heads of a group, CHUNK, P] and [blocks, G, CHUNK, N]
    # In float64, since the difference of two sums of strong decays may be a weak one.
    total = log_decay.double().transpose(1, 2).cumsum(-1)
    weighted = (x * d[..., None]).transpose(1, 2)
    b, c = b.transpose(1, 2).contiguous(), c.transpose(1, 2).contiguous()
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=total.device).tril()
    kept = torch.exp(total.float())
    remaining = torch.exp((total[..., -1:] - total).float())
    added = torch.unflatten(weighted * remaining[..., None], 1, (groups, -1)).transpose(3, 4)
    added = added.reshape(len(x), groups, -1, CHUNK)
    state = state.reshape(groups, -1, state_dim)
    found = []
    for i in range(len(x)):
        # Differences of tokens after the row's would be positive and overflow.
        distance = (
            (total[i][:, :, None] - total[i][:, None]).masked_fill(~causal, -torch.inf).float()
        )
        scores = torch.matmul(c[i], b[i].mT)[:, None] * torch.unflatten(
            torch.exp(distance), 0, (groups, -1)
        )
        inside = torch.matmul(scores.flatten(0, 1), weighted[i])
        carried = torch.unflatten(torch.matmul(c[i], state.mT), -1, (-1, head_dim))
        carried = carried.transpose(1, 2).flatten(0, 1) * kept[i][..., None]
        found.append((inside + carried).transpose(0, 1))
        decay = kept[i][:, -1:].expand(-1, head_dim).reshape(groups, -1, 1)
        state = state * decay + torch.matmul(added[i], b[i])
    y = torch.cat(found)[begin : begin + length]
    return y, state.view(heads, head_dim, state_dim)
