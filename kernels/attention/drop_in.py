"""Attention functions with the signatures of other libraries, computed by this one where it supports the arguments."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kernels.attention.autograd import flash_attention

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)
_told: set[str] = set()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention like `torch.nn.functional.scaled_dot_product_attention`.

    What this library does not support is handed back to PyTorch, with a log message for each reason, once.

    Args:
        query: [..., H, S, D].
        key: [..., K, S_k, D].
        value: [..., K, S_k, D_v].
        attn_mask: as in PyTorch.
        dropout_p: probability with which a weight is dropped; the seed is taken from PyTorch's generator.
        is_causal: whether query i sees keys 0 to i.
        scale: factor on the scores; None for 1 / sqrt(D).
        enable_gqa: whether H may be a multiple of K.

    Returns:
        [..., H, S, D_v] in the dtype of `query`.
    """
    reasons = sdpa_unsupported(query, key, value, attn_mask, is_causal, enable_gqa)
    if reasons:
        _tell(reasons)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    batch = query.shape[:-3]
    q, k, v = (it.reshape(-1, *it.shape[-3:]).transpose(1, 2) for it in (query, key, value))
    out = flash_attention(
        q,
        k,
        v,
        scale,
        causal=is_causal,
        dropout_p=dropout_p,
        dropout_seed=int(torch.randint(1 << 62, ())) if dropout_p else 0,
    )
    return out.transpose(1, 2).reshape(*batch, *query.shape[-3:-1], value.shape[-1])


def sdpa_unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> tuple[str, ...]:
    """List why PyTorch has to compute an attention; empty if this library can. Arguments as for PyTorch's."""
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        return ("the tensors do not have the form [..., H, S, D]",)
    if query.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return (f"no {query.dtype}",)
    tests = {
        "attn_mask": attn_mask is not None,
        "is_causal with fewer or more queries than keys": is_causal
        and query.shape[-2] != key.shape[-2],
        "head dims of queries and values that differ": query.shape[-1] != value.shape[-1],
        "key-value heads without enable_gqa": query.shape[-3] != key.shape[-3] and not enable_gqa,
        "heads that are no multiple of the key-value heads": not key.shape[-3]
        or query.shape[-3] % key.shape[-3] != 0,
        "shapes to broadcast": query.shape[:-3] != key.shape[:-3]
        or key.shape[:-1] != value.shape[:-1],
        "dtypes that differ": len({query.dtype, key.dtype, value.dtype}) > 1,
    }
    return tuple(reason for reason, applies in tests.items() if applies)


def _tell(reasons: tuple[str, ...]) -> None:
    for reason in reasons:
        if reason not in _told:
            _told.add(reason)
            _logger.info("PyTorch computes scaled_dot_product_attention: %s", reason)
