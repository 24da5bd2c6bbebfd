"""Dense causal attention in PyTorch for training: differentiable, on any device, compatible with `torch.compile`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, sliding_window: int | None = None
) -> Tensor:
    """Compute causal attention of whole sequences; shapes as in `kernels.flash_attention`."""
    grouped = q.shape[2] != k.shape[2]
    mask = None
    if sliding_window is not None and sliding_window < q.shape[1]:
        positions = torch.arange(q.shape[1], device=q.device)
        distance = positions[:, None] - positions[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=softmax_scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)
