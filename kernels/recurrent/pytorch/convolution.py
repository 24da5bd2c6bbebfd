"""The causal convolution of each channel over the last tokens, whose state is the inputs of the tokens before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kernels.recurrent.pytorch.functions import silu as _silu
from kernels.recurrent.pytorch.slots import read_rows, write_rows

if TYPE_CHECKING:
    from kernels.recurrent.segments import Segments


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    segments: Segments,
    *,
    silu: bool,
) -> Tensor:
    """Convolve the tokens of a step; the states that are written replace those before.

    The bits of a token depend on its input, the W - 1 before and the parameters alone, wherever a sequence is
    divided into steps.

    Args:
        x: [T, channels], any float dtype.
        weight: [channels, W]; the last tap is that of the token itself.
        bias: [channels] or None.
        state: [S, W - 1, channels] float32: the inputs of the last tokens, the oldest first.
        segments: of the step.
        silu: whether SiLU follows.

    Returns:
        [T, channels] float32.
    """
    x = x.float()
    out = torch.empty_like(x)
    rows, kept = segments.rows, state.shape[1]
    if rows:
        read, write = segments.slots[:rows].unbind(1)
        known = torch.cat((read_rows(state, read), x[:rows, None]), 1)
        out[:rows] = _convolve(known, weight, bias, silu=silu)[:, 0]
        write_rows(state, write, known[:, 1:])
    for first, end, source, target in segments.bounds:
        if first == end:
            continue
        before = state[source] if source >= 0 else torch.zeros_like(state[0])
        known = torch.cat((before, x[first:end]))
        out[first:end] = _convolve(known, weight, bias, silu=silu)
        if target >= 0:
            state[target] = known[len(known) - kept :]
    return out


def dense_conv(x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Convolve whole sequences, differentiably, with zeros before their first tokens.

    Args:
        x: [B, L, channels], any float dtype.
        weight: as for `causal_conv`.
        bias: likewise.
        silu: likewise.

    Returns:
        [B, L, channels] float32.
    """
    known = functional.pad(x.float(), (0, 0, weight.shape[1] - 1, 0))
    return _convolve(known, weight, bias, silu=silu)


def _convolve(known: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Return [..., L, channels] from the inputs [..., W - 1 + L, channels], added in the order of the tokens."""
    taps = weight.float().t().contiguous()
    length = known.shape[-2] - len(taps) + 1
    total = known[..., :length, :] * taps[0]
    for place in range(1, len(taps)):
        total = total + known[..., place : place + length, :] * taps[place]
    if bias is not None:
        total = total + bias.float()
    return _silu(total) if silu else total
