"""Attention with the signature, layouts and biases of xFormers' `memory_efficient_attention`.

xFormers is not imported. Its biases are recognized by the names of their types and read by their attributes:

    LowerTriangular*, LocalAttention*                  the same mask for every sequence of the batch
    BlockDiagonal*                                     packed sequences, in tensors with a batch of 1
    BlockDiagonal*PaddedKeys*, *GappyKeys*             keys with unused rows between the sequences
    PagedBlockDiagonal*                                keys in pages, found by `block_tables`

Keys with unused rows, in pages, or beyond the diagonal of a mask from the top left are copied together before.

Source: xFormers 0.0.35, `xformers.ops.fmha.attn_bias`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention.checks import describe
from kernels.attention.training.autograd import flash_attention
from kernels.attention.training.drop_in import dropout_seed, in_one_head_dim, log_fallback
from kernels.errors import ShapeError


class _Keys(Enum):
    """Where the keys of the sequences are."""

    WHOLE = "all rows of the batch"
    PACKED = "k_seqinfo.seqstart_py"
    SPACED = "k_seqinfo.seqstart_py and seqlen_py"
    PAGED_FROM_0 = "block_tables, and k_seqinfo.seqlen_py"
    PAGED = "block_tables, k_seqinfo.seqstart_py, and seqlen_py with the ends"


class _Corner(Enum):
    """Where the diagonal of a causal mask ends or begins."""

    TOP_LEFT = "query i sees key i last"
    BOTTOM_RIGHT = "the last query sees the last key"


class _Bias(NamedTuple):
    """How a type of xFormers is read.

    Attributes:
        keys: where the keys are.
        corner: of the causal mask; None for none.
        window: whether `_window_size` is the number of keys that a query sees at most.
        sides: whether `window_left` and `window_right` are the keys that it sees before and after its own.
    """

    keys: _Keys
    corner: _Corner | None = None
    window: bool = False
    sides: bool = False


_TOP, _BOTTOM = _Corner.TOP_LEFT, _Corner.BOTTOM_RIGHT
_BIASES: Final = {
    "LowerTriangularMask": _Bias(_Keys.WHOLE, _TOP),
    "LowerTriangularFromBottomRightMask": _Bias(_Keys.WHOLE, _BOTTOM),
    "LowerTriangularFromBottomRightLocalAttentionMask": _Bias(_Keys.WHOLE, _BOTTOM, window=True),
    "LocalAttentionFromBottomRightMask": _Bias(_Keys.WHOLE, _BOTTOM, sides=True),
    "BlockDiagonalMask": _Bias(_Keys.PACKED),
    "BlockDiagonalCausalMask": _Bias(_Keys.PACKED, _TOP),
    "BlockDiagonalCausalFromBottomRightMask": _Bias(_Keys.PACKED, _BOTTOM),
    "BlockDiagonalCausalLocalAttentionMask": _Bias(_Keys.PACKED, _TOP, window=True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _Bias(_Keys.PACKED, _BOTTOM, window=True),
    "BlockDiagonalPaddedKeysMask": _Bias(_Keys.SPACED),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _Bias(_Keys.SPACED, _BOTTOM),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _Bias(_Keys.SPACED, _BOTTOM, window=True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _Bias(_Keys.SPACED, _BOTTOM, sides=True),
    "BlockDiagonalGappyKeysMask": _Bias(_Keys.SPACED),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _Bias(_Keys.SPACED, _BOTTOM),
    "PagedBlockDiagonalPaddedKeysMask": _Bias(_Keys.PAGED_FROM_0),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _Bias(_Keys.PAGED_FROM_0, _BOTTOM),
    "PagedBlockDiagonalGappyKeysMask": _Bias(_Keys.PAGED),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": _Bias(_Keys.PAGED, _BOTTOM),
}  # fmt: skip


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: object = None,
    p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Compute attention like xFormers' `memory_efficient_attention`, differentiably.

    Dimensions: B sequences, M queries and N keys of each, H heads, G groups of H heads, K and K_v head dims. Keys that
    are expanded from one head of each group (stride 0) are read once for the group. Their gradient is then right for
    the tensor that was expanded, but not for each head of the expanded one. Gradients have the same bits in every run
    only with `torch.use_deterministic_algorithms(True)`.

    Args:
        query: [B, M, K], [B, M, H, K] or [B, M, G, H, K].
        key: [B, N, K], [B, N, H, K] or [B, N, G, H, K].
        value: as `key`, with K_v.
        attn_bias: None, a mask of xFormers with sequences on the device of the query, or a tensor [B, H, M, N] to be
            added to the scores, with which PyTorch computes the attention, and a log message says so.
        p: probability with which a weight is dropped; the seed is taken from PyTorch's generator.
        scale: factor on the scores; None for 1 / sqrt(K).

    Returns:
        Like `query`, with K_v. Rows that see no key are 0.

    Raises:
        ShapeError: shapes, dtypes or the sequences of the bias do not fit each other, or the bias is not supported.
        NoKernelError: no row of `kernels.attention.training.registry` supports it.

    Example:
        >>> query, key, value = torch.randn(3, 2, 64, 8, 32)
        >>> memory_efficient_attention(query, key, value).shape
        torch.Size([2, 64, 8, 32])
    """
    q, k, v = _with_heads(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    shape = (*query.shape[:-1], value.shape[-1])
    if isinstance(attn_bias, torch.Tensor):
        return _dense(q, k, v, attn_bias, p, scale).reshape(shape)
    plan = _plan(attn_bias, q, k)
    if plan.index is not None:
        k, v = (it.flatten(0, 1).index_select(0, plan.index) for it in (k, v))
    elif plan.cu_seqlens_q is not None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    elif plan.keys is not None:
        k, v = k[:, : plan.keys], v[:, : plan.keys]
    if plan.cu_seqlens_q is not None:
        q = q.flatten(0, 1)
    q, k, v = in_one_head_dim(q, k, v)
    out = flash_attention(
        q,
        k,
        v,
        scale,
        plan.window,
        causal=plan.causal,
        dropout_p=p,
        dropout_seed=dropout_seed(p),
        cu_seqlens_q=plan.cu_seqlens_q,
        cu_seqlens_k=plan.cu_seqlens_k,
        max_seqlen_q=plan.longest_q,
        max_seqlen_k=plan.longest_k,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[..., : value.shape[-1]].reshape(shape)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How `flash_attention` computes a bias.

    Attributes:
        causal: see `flash_attention`.
        window: keys that a query sees at most; None for all.
        keys: the first keys of each sequence that are seen; None for all.
        index: rows of the flattened keys, in the order in which they are packed; None for all.
        cu_seqlens_q: offsets of packed queries; None for a batch.
        cu_seqlens_k: offsets of packed keys.
        longest_q: queries of the longest sequence.
        longest_k: keys of the longest sequence.
    """

    causal: bool = False
    window: int | None = None
    keys: int | None = None
    index: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    longest_q: int | None = None
    longest_k: int | None = None


def _plan(bias: object, q: Tensor, k: Tensor) -> _Plan:
    if bias is None:
        return _Plan()
    name = type(bias).__name__
    rule = _BIASES.get(name)
    if rule is None:
        raise ShapeError(
            f"attn_bias is a {name}; supported are None, a tensor, and xFormers' {', '.join(sorted(_BIASES))}"
        )
    try:
        return _read(bias, name, rule, q, k)
    except AttributeError as error:
        raise ShapeError(
            f"attn_bias is a {name} without the attributes of xFormers 0.0.35: {error}"
        ) from error


def _read(bias: Any, name: str, rule: _Bias, q: Tensor, k: Tensor) -> _Plan:
    window = bias._window_size if rule.window else None  # noqa: SLF001 - xFormers has no public name
    if rule.sides:
        if bias.window_right:
            raise ShapeError(
                f"attn_bias is a {name} with window_right {bias.window_right}; only 0 is supported"
            )
        window = bias.window_left + 1
    causal = rule.corner is not None
    if rule.keys is _Keys.WHOLE:
        keys = None
        if rule.corner is _TOP:
            keys = _cut(name, q.shape[1], k.shape[1])
        return _Plan(causal, window, keys)
    seqstart, ends_q = bias.q_seqinfo.seqstart, bias.q_seqinfo.seqstart_py
    _check_sequences(name, bias, q, k)
    ranges = _ranges(bias, rule.keys)
    if len(ranges) != len(ends_q) - 1:
        raise ShapeError(
            f"attn_bias is a {name} with {len(ends_q) - 1} sequences of queries and {len(ranges)} of keys"
        )
    if rule.corner is _TOP:
        ranges = [
            range(keys.start, keys.start + _cut(name, end - start, len(keys)))
            for (start, end), keys in zip(itertools.pairwise(ends_q), ranges, strict=True)
        ]
    is_paged = rule.keys in (_Keys.PAGED, _Keys.PAGED_FROM_0)
    index = _paged(name, bias, ranges, k) if is_paged else _rows(name, ranges, k)
    starts_k = torch.tensor([0, *itertools.accumulate(map(len, ranges))], dtype=torch.int32)
    return _Plan(
        causal,
        window,
        None,
        index,
        seqstart,
        starts_k.to(q.device),
        max((end - start for start, end in itertools.pairwise(ends_q)), default=0),
        max(map(len, ranges), default=0),
    )


def _cut(name: str, num_q: int, num_k: int) -> int:
    """Return the number of keys up to the diagonal from the top left, which then ends at the bottom right."""
    if num_q > num_k:
        raise ShapeError(
            f"attn_bias is a {name} with {num_q} queries on {num_k} keys; at most as many queries as keys are "
            "supported, or a mask from the bottom right"
        )
    return num_q


def _check_sequences(name: str, bias: Any, q: Tensor, k: Tensor) -> None:
    starts, seqstart = bias.q_seqinfo.seqstart_py, bias.q_seqinfo.seqstart
    if q.shape[0] != 1 or k.shape[0] != 1:
        raise ShapeError(
            f"attn_bias is a {name} and the batches are {q.shape[0]} and {k.shape[0]}; expected 1, with the sequences "
            "one after the other"
        )
    if starts[-1] != q.shape[1]:
        raise ShapeError(f"attn_bias is a {name} with {starts[-1]} queries; query has {q.shape[1]}")
    if seqstart.device != q.device:
        raise ShapeError(
            f"attn_bias is a {name} on {seqstart.device} and query on {q.device}; move it with its method `to`"
        )


def _ranges(bias: Any, keys: _Keys) -> list[range]:
    """Return the keys of each sequence: rows, or positions in its pages."""
    info = bias.k_seqinfo
    if keys is _Keys.PACKED:
        return [range(start, end) for start, end in itertools.pairwise(info.seqstart_py)]
    if keys is _Keys.SPACED:
        pairs = zip(info.seqstart_py, info.seqlen_py, strict=False)  # the starts have an end too
        return [range(start, start + length) for start, length in pairs]
    if keys is _Keys.PAGED_FROM_0:
        return [range(length) for length in info.seqlen_py]
    return [range(start, end) for start, end in zip(info.seqstart_py, info.seqlen_py, strict=False)]


def _rows(name: str, ranges: Sequence[range], k: Tensor) -> Tensor | None:
    """Return the rows of all sequences; None if these are all rows, in their order."""
    first = min((it.start for it in ranges), default=0)
    last = max((it.stop for it in ranges), default=0)
    if first < 0 or last > k.shape[1]:
        raise ShapeError(f"attn_bias is a {name} with keys {first} to {last}; key has {k.shape[1]}")
    filled = [it for it in ranges if it]
    if [0, *(it.stop for it in filled)] == [*(it.start for it in filled), k.shape[1]]:
        return None  # each sequence begins where the one before ends
    parts = [torch.arange(it.start, it.stop) for it in ranges]
    return torch.cat(parts).to(k.device)


def _paged(name: str, bias: Any, ranges: Sequence[range], k: Tensor) -> Tensor:
    """Return the rows of positions that `block_tables` maps to pages."""
    tables, size = bias.block_tables, bias.page_size
    if len(tables) != len(ranges):
        raise ShapeError(
            f"attn_bias is a {name} with block_tables of {len(tables)} sequences; it has {len(ranges)}"
        )
    last = max((it.stop for it in ranges), default=0)
    if last > tables.shape[1] * size:
        raise ShapeError(
            f"attn_bias is a {name} with keys up to {last}; block_tables has {tables.shape[1]} pages of {size} keys"
        )
    parts = []
    for table, positions in zip(tables, ranges, strict=True):
        at = torch.arange(positions.start, positions.stop, device=k.device)
        parts.append(table.to(k.device).long()[at // size] * size + at % size)
    index = torch.cat(parts)
    if len(index) and not index.is_cuda:
        for key in (int(index.max()), int(index.min())):
            if not 0 <= key < k.shape[1]:
                raise ShapeError(
                    f"attn_bias is a {name} whose block_tables lead to key {key}; key has {k.shape[1]}"
                )
    return index


def _with_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q as [B, M, heads, K], k and v with as many heads or one for each group."""
    tensors = (query, key, value)
    if not 3 <= query.ndim <= 5 or any(
        it.ndim != query.ndim or it.shape[2:-1] != query.shape[2:-1] for it in tensors
    ):
        raise ShapeError(
            f"query is {describe(query)}, key is {describe(key)}, value is {describe(value)}; expected [B, M, K], "
            "[B, M, H, K] or [B, M, G, H, K], with the same heads (expand those of keys and values)"
        )
    if key.shape[:-1] != value.shape[:-1] or key.shape[-1] != query.shape[-1]:
        raise ShapeError(
            f"query is {describe(query)}, key is {describe(key)}, value is {describe(value)}; expected as many values "
            "as keys, and keys of the query's head dim"
        )
    if query.ndim == 3:
        return query[:, :, None], key[:, :, None], value[:, :, None]
    if query.ndim == 4:
        return query, key, value
    if all(_is_repeated(it) for it in (key, value)):
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _is_repeated(x: Tensor) -> bool:
    """Whether the heads of each group are one head, and no gradient of each is needed."""
    needed = x.requires_grad and (x.is_leaf or x.retains_grad)
    return x.stride(3) == 0 and not needed


def _dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, p: float, scale: float) -> Tensor:
    log_fallback("memory_efficient_attention", ("a tensor as attn_bias",))
    wanted = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias.shape != wanted or not bias.is_floating_point() or bias.device != q.device:
        raise ShapeError(
            f"attn_bias is {describe(bias)}; expected numbers to add, [B, H, M, N] = {list(wanted)} on {q.device}"
        )
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias.to(q.dtype),
        dropout_p=p,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
