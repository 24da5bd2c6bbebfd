"""The gated delta rule in PyTorch's operations: token by token for decode rows, in blocks of tokens for prompts.

A block is computed from products of matrices. With the sums G of g from the first token of a block, the values that the
state before it, S, and the earlier tokens of the block leave to be written, U, solve a unit lower triangular system:

    (1 + tril(beta (K K^T) exp(G_i - G_j), -1)) U = beta (V - exp(G) K S)
    O = exp(G) Q S + tril((Q K^T) exp(G_i - G_j)) U
    S = exp(G_last) S + (exp(G_last - G) K)^T U

Source: Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024 (arXiv 2406.06484), for the form;
Gated Delta Networks, 2024 (arXiv 2412.06464), for the decay in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from kernels.recurrent.problem import CHUNK, LEAST_DECAY, NORM_EPS
from kernels.recurrent.pytorch.convolution import causal_conv, dense_conv
from kernels.recurrent.pytorch.functions import sigmoid, silu, softplus
from kernels.recurrent.pytorch.slots import read_rows, write_rows

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import GatedDeltaShape, RecurrentWeights
    from kernels.recurrent.segments import Segments


class _Heads(NamedTuple):
    """What the rule reads, float32: q and k [..., H, Dk], v [..., H, Dv], g and beta [..., H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class GatedDelta:
    """Computes in float32; see `kernels.recurrent.segments.RecurrentKernel`.

    On a CPU a token's bits depend on no other sequence: decode rows are computed by operations on elements and sums
    within a row, and prompts one after another.

    Args:
        shape: of the mixer.
        weights: read at each call, so that they may be trained.
    """

    def __init__(self, shape: GatedDeltaShape, weights: RecurrentWeights) -> None:
        assert weights.a_log is not None
        assert weights.dt_bias is not None
        assert weights.norm is not None
        self.shape, self.weights = shape, weights
        self._a_log, self._dt_bias, self._norm = weights.a_log, weights.dt_bias, weights.norm

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
    ) -> Tensor:
        """See `RecurrentKernel`."""
        assert gates is not None
        conv_state, state = states
        mixed, z = torch.split(projected, [self.shape.channels, self.shape.inner], -1)
        weights = self.weights
        convolved = causal_conv(
            mixed, weights.conv, weights.conv_bias, conv_state, segments, silu=True
        )
        heads = self._heads(convolved, gates)
        out = torch.empty_like(heads.v)
        if rows := segments.rows:
            out[:rows] = _decode(_Heads(*(it[:rows] for it in heads)), state, segments.slots[:rows])
        for (first, end, read, write), start in zip(segments.bounds, segments.starts, strict=True):
            if first == end:
                continue
            before = state[read] if read >= 0 else torch.zeros_like(state[0])
            prompt = _Heads(*(it[first:end].transpose(0, 1) for it in heads))
            found, after = _blocks(prompt, before, start)
            out[first:end] = found.transpose(0, 1)
            if write >= 0:
                state[write] = after
        return self._gated(out, z)

    def dense(self, projected: Tensor, gates: Tensor) -> Tensor:
        """Compute whole sequences from states of zeros; differentiable.

        Args:
            projected: [B, L, channels + inner].
            gates: [B, L, 2 * H].

        Returns:
            [B, L, inner] in the dtype of `projected`.
        """
        shape = self.shape
        mixed, z = torch.split(projected, [shape.channels, shape.inner], -1)
        convolved = dense_conv(mixed, self.weights.conv, self.weights.conv_bias, silu=True)
        heads = _Heads(*(it.transpose(1, 2) for it in self._heads(convolved, gates)))
        state = convolved.new_zeros(
            (len(projected), shape.num_heads, shape.key_dim, shape.value_dim)
        )
        out, _ = _blocks(heads, state, 0)
        return self._gated(out.transpose(1, 2), z)

    def _heads(self, convolved: Tensor, gates: Tensor) -> _Heads:
        """Split the result of the convolution into heads, and compute decays and step sizes.

        Args:
            convolved: [..., channels] float32.
            gates: [..., 2 * H].
        """
        shape = self.shape
        keys = shape.num_key_heads * shape.key_dim
        q, k, v = torch.split(convolved, [keys, keys, shape.inner], -1)
        each = shape.num_heads // shape.num_key_heads
        q, k = (
            _unit(torch.unflatten(it, -1, (shape.num_key_heads, shape.key_dim))).repeat_interleave(
                each, -2
            )
            for it in (q, k)
        )
        b, a = gates.float().chunk(2, -1)
        g = -self._a_log.float().exp() * softplus(a + self._dt_bias.float())
        return _Heads(
            q * shape.key_dim**-0.5,
            k,
            torch.unflatten(v, -1, (shape.num_heads, shape.value_dim)),
            g.clamp(min=LEAST_DECAY),
            sigmoid(b),
        )

    def _gated(self, out: Tensor, z: Tensor) -> Tensor:
        """Normalize heads, [..., H, Dv] float32, and multiply them by the SiLU of z; [..., inner] of z's dtype."""
        normalized = functional.rms_norm(
            out, out.shape[-1:], self._norm.float(), self.shape.eps
        ).flatten(-2)
        return (normalized * silu(z.float())).to(z.dtype)


def _unit(x: Tensor) -> Tensor:
    """Scale vectors to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _decode(heads: _Heads, states: Tensor, slots: Tensor) -> Tensor:
    """Compute one token of each row, and write the states after it; [R, H, Dv].

    Args:
        heads: [R, H, ...].
        states: [S, H, Dk, Dv].
        slots: [R, 2], read and written.
    """
    read, write = slots.unbind(-1)
    state = read_rows(states, read)
    state *= heads.g.exp()[..., None, None]
    known = (state * heads.k[..., None]).sum(-2)
    new = heads.beta[..., None] * (heads.v - known)
    state += heads.k[..., None] * new[..., None, :]
    out = (state * heads.q[..., None]).sum(-2)
    write_rows(states, write, state)
    return out


def _blocks(heads: _Heads, state: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Compute consecutive tokens, in blocks that begin at positions that are multiples of CHUNK.

    Args:
        heads: [..., H, L, D] each, [..., H, L] of g and beta.
        state: [..., H, Dk, Dv] before the first token.
        start: position of the first token.

    Returns:
        [..., H, L, Dv], and the state after the last token.
    """
    length = heads.v.shape[-2]
    sizes = [min(CHUNK - start % CHUNK, length)]
    while (left := length - sum(sizes)) > 0:
        sizes.append(min(CHUNK, left))
    parts = [torch.split(it, sizes, -2) for it in (heads.q, heads.k, heads.v)]
    parts += [torch.split(it, sizes, -1) for it in (heads.g, heads.beta)]
    outs = []
    for block in zip(*parts, strict=True):
        out, state = _block(_Heads(*block), state)
        outs.append(out)
    return torch.cat(outs, -2), state


def _block(heads: _Heads, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute a block of C <= CHUNK tokens; arguments and results as of `_blocks`."""
    q, k, v, g, beta = heads
    # In float64, since the difference of two sums of strong decays may be a weak one.
    total = g.double().cumsum(-1)
    later = torch.ones(2 * g.shape[-1:], dtype=torch.bool, device=g.device).triu(1)
    between = total[..., :, None] - total[..., None, :]
    between = between.masked_fill(later, float("-inf")).float().exp()
    decay = total.float().exp()[..., None]
    system = beta[..., None] * (k @ k.mT) * between
    wanted = beta[..., None] * (v - decay * (k @ state))
    new = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = decay * (q @ state) + ((q @ k.mT) * between) @ new
    remaining = (total[..., -1:] - total).float().exp()[..., None]
    return out, decay[..., -1:, :] * state + (k * remaining).mT @ new
