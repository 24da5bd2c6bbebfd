"""Attention functions with the signatures of other libraries, computed by this one where it supports the arguments."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.training.autograd import flash_attention, in_autocast_dtype

_logger = logging.getLogger(__name__)
_logged: set[str] = set()


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

    What this library does not support is handed back to PyTorch, with a log message for each reason, once. Second
    derivatives and `torch.vmap` are not supported, and raise PyTorch's errors. As in PyTorch, gradients have the same
    bits in every run only with `torch.use_deterministic_algorithms(True)`.

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

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 64, 32)
        >>> out = scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> theirs = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> torch.allclose(out, theirs, atol=1e-5)
        True
    """
    query, key, value = in_autocast_dtype(query, key, value)
    reasons = sdpa_unsupported(query, key, value, attn_mask, is_causal, enable_gqa, dropout_p)
    if reasons:
        log_fallback("scaled_dot_product_attention", reasons)
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
    batch, value_dim = query.shape[:-3], value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    query, key, value = in_one_head_dim(query, key, value)
    count = math.prod(batch)  # not -1, which is ambiguous for tensors without elements
    q, k, v = (it.reshape(count, *it.shape[-3:]).transpose(1, 2) for it in (query, key, value))
    out = flash_attention(
        q,
        k,
        v,
        scale,
        causal=is_causal,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed(dropout_p),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[..., :value_dim].transpose(1, 2).reshape(*batch, *query.shape[-3:-1], value_dim)


def sdpa_unsupported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> tuple[str, ...]:
    """List why PyTorch has to compute an attention; empty if this library can. Arguments as for PyTorch's."""
    tensors = (query, key, value)
    if any(it.is_nested for it in tensors):
        return ("nested tensors",)
    if query.ndim < 3 or not query.ndim == key.ndim == value.ndim:
        return ("the tensors do not have the form [..., H, S, D]",)
    if query.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return (f"no {query.dtype}",)
    tests = {
        "attn_mask": attn_mask is not None,
        "is_causal with fewer or more queries than keys": is_causal
        and query.shape[-2] != key.shape[-2],
        "head dims of queries and keys that differ": query.shape[-1] != key.shape[-1],
        "a head dim of 0": not query.shape[-1] or not value.shape[-1],
        "dropout of all weights": not 0 <= dropout_p < 1,
        "dropout in a graph of torch.compile, which cannot contain a new seed": dropout_p > 0
        and torch.compiler.is_compiling(),
        "key-value heads without enable_gqa": query.shape[-3] != key.shape[-3] and not enable_gqa,
        "heads that are no multiple of the key-value heads": not key.shape[-3]
        or query.shape[-3] % key.shape[-3] != 0,
        "shapes to broadcast": query.shape[:-3] != key.shape[:-3]
        or key.shape[:-1] != value.shape[:-1],
        "dtypes that differ": len({it.dtype for it in tensors}) > 1,
        "devices that differ": len({it.device for it in tensors}) > 1,
    }
    return tuple(reason for reason, applies in tests.items() if applies)


def in_one_head_dim(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return tensors whose last dimensions are that of the longest, by zeros, which change no score and no value."""
    size = max(query.shape[-1], value.shape[-1])
    return tuple(
        it if it.shape[-1] == size else functional.pad(it, (0, size - it.shape[-1]))
        for it in (query, key, value)
    )


def dropout_seed(dropout_p: float) -> int:
    """Return a seed for `flash_attention` from PyTorch's generator; 0 without dropout, which leaves it unchanged."""
    return int(torch.randint(1 << 62, ())) if dropout_p else 0


def log_fallback(function: str, reasons: tuple[str, ...]) -> None:
    """Log why PyTorch computes a call of a function: each reason once in a process."""
    for reason in reasons:
        message = f"PyTorch computes {function}: {reason}"
        if message not in _logged:
            _logged.add(message)
            _logger.info("%s", message)


# While torch.compile traces a caller, it runs once. `torch.compiler.assume_constant_result` sets this too, but it
# imports the compiler first, which would take a second and 76 MiB in every process that imports the kernels.
setattr(log_fallback, "_dynamo_marked_constant", True)  # noqa: B010 - a type checker knows no such attribute of a function
