"""Differentiable attention of whole sequences: exact, in memory that grows linearly with their length.

The operators `tessera::flash_attention` and `tessera::flash_attention_backward` are registered with PyTorch, so that
`torch.compile` and tensors without data work. `kernels.attention.training.registry` selects what computes them.

Source: Dao, "FlashAttention-2", 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch
from torch import Tensor

from kernels.arch import detect
from kernels.attention.checks import describe
from kernels.attention.training.block_mask import BlockMask
from kernels.attention.training.dense import flash_attention as _sdpa
from kernels.attention.training.registry import TrainingBatch, TrainingProblem, select_training
from kernels.errors import ShapeError
from kernels.selection import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.attention.training.registry import TrainingKernel

_LARGEST_SEED: Final = (1 << 63) - 1


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    sliding_window: int | None = ...,
    *,
    causal: bool = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    block_mask: BlockMask | None = ...,
    dropout_p: float = ...,
    dropout_seed: int = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = ...,
    sliding_window: int | None = ...,
    *,
    causal: bool = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    block_mask: BlockMask | None = ...,
    dropout_p: float = ...,
    dropout_seed: int = ...,
    cu_seqlens_q: Tensor | None = ...,
    cu_seqlens_k: Tensor | None = ...,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    *,
    causal: bool = True,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of whole sequences, differentiably and, by default, with the same bits in every run.

    Dimensions: B sequences, S tokens of each, T tokens of all, H query heads, K key-value heads, D head dim.

    Args:
        q: [B, S, H, D], or packed [T, H, D] with `cu_seqlens_q`.
        k: [B, S_k, K, D] or packed [T_k, K, D]; K divides H.
        v: as `k`.
        softmax_scale: factor on the scores; None for 1 / sqrt(D).
        sliding_window: keys that a query sees at most, its own included; None for all. Only with `causal`.
        causal: whether query i of m sees no key after key n - m + i of n.
        softcap: c in c * tanh(score / c); None for none.
        alibi_slopes: [H] or [B, H] float32; slope * |n - m + i - j| is subtracted from the score of query i and key j.
            They get no gradient.
        block_mask: tiles that queries see; the other rules still apply. None for all.
        dropout_p: probability with which a weight is dropped, less than 1.
        dropout_seed: from 0 on; the same seed drops the same weights, on every device.
        cu_seqlens_q: [B + 1] int32, first query of each packed sequence, and T; checked only on a CPU.
        cu_seqlens_k: the same for keys; None if they are those of the queries.
        max_seqlen_q: at least the longest sequence's queries; None reads it from `cu_seqlens_q`, which waits for a GPU.
        max_seqlen_k: the same for keys.
        deterministic: whether the gradient of q must have the same bits in every run; if not, a faster kernel may add
            it up in any order.
        return_lse: whether to return the log-sum-exps too; they are differentiable.

    Returns:
        A tensor like `q`, inside `torch.autocast` in its dtype. Rows that see nothing are 0. With `return_lse` also
        [B, S, H] or [T, H] float32 (float64 for float64), the natural logarithm of the sum of exponentials of a row's
        scores, -inf for rows that see nothing.

    Raises:
        ShapeError: shapes, dtypes or arguments do not fit each other.
        NoKernelError: no row of `kernels.attention.training.registry` supports it.

    Example:
        >>> q = torch.randn(2, 64, 8, 32, requires_grad=True)
        >>> k, v = torch.randn(2, 2, 64, 4, 32)  # each head of keys serves two of queries
        >>> out = flash_attention(q, k, v, sliding_window=16)
        >>> out.square().mean().backward()
        >>> out.shape == q.grad.shape
        True
    """
    q, k, v = in_autocast_dtype(q, k, v)
    _check_tensors(q, k, v, packed=cu_seqlens_q is not None)
    _check_numbers(causal, sliding_window, softcap, dropout_p, dropout_seed)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    extras = (softcap, alibi_slopes, block_mask, cu_seqlens_q)
    is_plain = causal and not return_lse and not dropout_p and all(it is None for it in extras)
    if is_plain and _prefers_pytorch(q, k):
        return _sdpa(q, k, v, scale, sliding_window)
    if cu_seqlens_q is None:
        (count, length_q), length_k = q.shape[:2], k.shape[1]
        steps = torch.arange(count + 1, dtype=torch.int32, device=q.device)
        batch = TrainingBatch(steps * length_q, steps * length_k)
    else:
        keys = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        _check_starts(cu_seqlens_q, keys, q, k)
        batch = TrainingBatch(cu_seqlens_q, keys)
        length_q = _longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
        given = max_seqlen_q if keys is cu_seqlens_q and max_seqlen_k is None else max_seqlen_k
        length_k = _longest(keys) if given is None else given
    if alibi_slopes is not None:
        batch = batch._replace(alibi_slopes=_slopes(alibi_slopes, q, len(batch.cu_seqlens_q) - 1))
    if block_mask is not None:
        _check_mask(block_mask, length_q, length_k)
        batch = batch._replace(mask=block_mask.arrays)
    problem = TrainingProblem(
        softmax_scale=scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        max_seqlen_q=length_q,
        max_seqlen_k=length_k,
        mask_tile=(block_mask.block_q, block_mask.block_k) if block_mask else (0, 0),
        deterministic=deterministic,
    )
    rows = [it if cu_seqlens_q is not None else it.flatten(0, 1) for it in (q, k, v)]
    out, lse = torch.ops.tessera.flash_attention(*rows, batch.encode(), *problem.encode())
    out, lse = out.view(q.shape), lse.view(q.shape[:-1])
    return (out, lse) if return_lse else out


@torch.library.custom_op(
    "tessera::flash_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] batch, int[] ints, float[] floats) -> (Tensor, Tensor)",
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, batch: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kernel, sequences, problem = _select(q, k, batch, ints, floats)
    # It would change the products of the row in PyTorch.
    with torch.autocast(q.device.type, enabled=False):
        return kernel.forward(_rows(q), _rows(k), _rows(v), sequences, problem)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, batch: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    del k, v, batch, ints, floats
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_lse_dtype(q))


@torch.library.custom_op(
    "tessera::flash_attention_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor[] saved, Tensor[] batch, int[] ints, float[] floats) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    batch: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    kernel, sequences, problem = _select(q, k, batch, ints, floats)
    with torch.autocast(q.device.type, enabled=False):
        return kernel.backward(
            (_rows(grads[0]), grads[1].contiguous()),
            (_rows(q), _rows(k), _rows(v), out, lse),
            sequences,
            problem,
        )


@_backward.register_fake
def _(
    grads: Sequence[Tensor],
    saved: Sequence[Tensor],
    batch: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    del grads, batch, ints, floats
    q, k, v = (it.new_empty(it.shape) for it in saved[:3])
    return q, k, v


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, batch, ctx.ints, ctx.floats = inputs
    ctx.save_for_backward(q, k, v, *output, *batch)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    saved, batch = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    gradients = torch.ops.tessera.flash_attention_backward(
        [dout, dlse], list(saved), list(batch), ctx.ints, ctx.floats
    )
    return (*gradients, [None] * len(batch), None, None)


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype of `torch.autocast`, in which PyTorch computes attention; unchanged outside of it."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    return tuple(it.to(dtype) if it.dtype in narrow else it for it in tensors)


def _select(
    q: Tensor, k: Tensor, batch: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]
) -> tuple[TrainingKernel, TrainingBatch, TrainingProblem]:
    sequences, problem = TrainingBatch.decode(batch), TrainingProblem.decode(ints, floats)
    spec = select_training(q, k, sequences, problem, detect(q.device))
    return load(spec.target), sequences, problem


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _rows(x: Tensor) -> Tensor:
    """Return x, [T, H, D], contiguous in D."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _prefers_pytorch(q: Tensor, k: Tensor) -> bool:
    """Whether PyTorch's own attention computes plain causal attention: on CPUs it is the fastest."""
    has_kernel = q.is_cuda and detect(q.device).has_triton_tensor_cores
    return not has_kernel and q.shape[1] == k.shape[1]


def _longest(cu_seqlens: Tensor) -> int:
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if len(cu_seqlens) > 1 else 0


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, packed: bool) -> None:
    dims = 3 if packed else 4
    if (
        q.ndim != dims
        or k.shape != v.shape
        or k.ndim != dims
        or (not packed and q.shape[0] != k.shape[0])
        or q.shape[-1] != k.shape[-1]
        or not k.shape[-2]
        or q.shape[-2] % k.shape[-2]
        or len({q.dtype, k.dtype, v.dtype}) > 1
        or len({q.device, k.device, v.device}) > 1
    ):
        form = "[T, H, D], k and v [T, K, D]" if packed else "[B, S, H, D], k and v [B, S, K, D]"
        raise ShapeError(
            f"q is {describe(q)}, k is {describe(k)}, v is {describe(v)}; expected "
            f"q {form}, H a multiple of K, all of one dtype and on one device"
        )


def _check_numbers(
    causal: bool,
    sliding_window: int | None,
    softcap: float | None,
    dropout_p: float,
    dropout_seed: int,
) -> None:
    if sliding_window is not None and (sliding_window < 1 or not causal):
        raise ShapeError(f"sliding_window is {sliding_window}; expected at least 1, with causal")
    if softcap is not None and not softcap > 0:
        raise ShapeError(f"softcap is {softcap}; expected more than 0")
    if not 0 <= dropout_p < 1:
        raise ShapeError(f"dropout_p is {dropout_p}; expected 0 or more, less than 1")
    if not 0 <= dropout_seed <= _LARGEST_SEED:
        raise ShapeError(f"dropout_seed is {dropout_seed}; expected 0 to {_LARGEST_SEED}")


def _slopes(slopes: Tensor, q: Tensor, num_seqs: int) -> Tensor:
    """Return slopes of every sequence, [B, H]."""
    heads = q.shape[-2]
    fits = slopes.shape in ((heads,), (num_seqs, heads))
    if not fits or slopes.dtype is not torch.float32 or slopes.device != q.device:
        raise ShapeError(
            f"alibi_slopes is {describe(slopes)} on {slopes.device}; expected float32 [{heads}] or "
            f"[{num_seqs}, {heads}] on {q.device}"
        )
    return slopes.expand(num_seqs, heads).contiguous()


def _check_starts(cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor) -> None:
    for name, starts, rows in (("cu_seqlens_q", cu_q, q), ("cu_seqlens_k", cu_k, k)):
        if starts.ndim != 1 or not len(starts) or starts.dtype is not torch.int32:
            raise ShapeError(f"{name} is {describe(starts)}; expected int32 [B + 1]")
        if len(starts) != len(cu_q) or starts.device != rows.device:
            raise ShapeError(
                f"{name} is {describe(starts)} on {starts.device}; expected int32 [{len(cu_q)}] on {rows.device}"
            )
        # A GPU would have to be waited for.
        if not starts.is_cuda and not torch.compiler.is_compiling():
            _check_offsets(name, starts, len(rows))


def _check_offsets(name: str, starts: Tensor, num_rows: int) -> None:
    numbers = starts.tolist()
    if numbers[0] or numbers[-1] != num_rows or numbers != sorted(numbers):
        raise ShapeError(f"{name} is {numbers}; expected 0, ascending numbers and {num_rows}")


def _check_mask(mask: BlockMask, length_q: int, length_k: int) -> None:
    rows, columns = len(mask.row_starts) - 1, len(mask.column_starts) - 1
    if rows * mask.block_q < length_q or columns * mask.block_k < length_k:
        raise ShapeError(
            f"the block mask has tiles for {rows * mask.block_q} queries and {columns * mask.block_k} keys; "
            f"the longest sequences have {length_q} and {length_k}"
        )
