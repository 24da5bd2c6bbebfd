"""Checks the arguments of the public operations. Each error states the given and the expected value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.attention.cascade import check_prefix
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.errors import ShapeError

if TYPE_CHECKING:
    from kernels.attention.plan import AttentionPlan

_SLOT_DTYPES = (torch.int32, torch.int64)
_WRITTEN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_batch(problem: AttentionProblem, batch: PagedBatch | PackedBatch) -> None:
    """Check that a batch is consistent and fits the problem, without reading from a GPU.

    Raises:
        ShapeError: a tensor's shape, dtype, stride or device, or a bound, is wrong.
    """
    num_seqs = batch.num_seqs
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "cu_seqlens_q": (batch.cu_seqlens_q, (num_seqs + 1,))
    }
    if isinstance(batch, PagedBatch):
        if problem.block_size is None:
            raise ShapeError("the batch is paged; the problem has no block_size")
        expected["seq_lens"] = (batch.seq_lens, (num_seqs,))
        expected["block_table"] = (batch.block_table, (num_seqs, *batch.block_table.shape[-1:]))
        check_prefix(batch, problem.block_size)
    else:
        if problem.block_size is not None:
            raise ShapeError(
                f"the batch is packed; the problem has block_size {problem.block_size}, not None"
            )
        expected["cu_seqlens_k"] = (batch.cu_seqlens_k, (num_seqs + 1,))
    device = batch.cu_seqlens_q.device
    for name, (tensor, shape) in expected.items():
        if (
            tensor.shape != shape
            or tensor.dtype is not torch.int32
            or tensor.device != device
            # Rows of the table need not be adjacent: it may be a slice of a wider table.
            or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1)
        ):
            raise ShapeError(
                f"{name} is {describe(tensor)}; expected {list(shape)} torch.int32 contiguous in "
                f"its last dimension on {device}"
            )
    if problem.phase is Phase.DECODE and batch.max_seqlen_q > problem.max_query_tokens:
        raise ShapeError(
            f"max_seqlen_q is {batch.max_seqlen_q}; this decode takes at most "
            f"{problem.max_query_tokens} per sequence"
        )


def check_lse(lse: Tensor | None, plan: AttentionPlan) -> None:
    """Check that an `lse` tensor of the plan's shape is given if and only if the problem has `lse`.

    Raises:
        ShapeError: the tensor is missing, unexpected or of the wrong shape, dtype, stride or device.
    """
    if lse is None and not plan.problem.lse:
        return
    shape = plan.q_shape[:2]
    if lse is None or not plan.problem.lse:
        given, asked = (
            "nothing" if lse is None else "a tensor",
            "asks" if plan.problem.lse else "does not ask",
        )
        raise ShapeError(f"lse is {given}; the plan's problem {asked} for it")
    if (
        lse.shape != shape
        or lse.dtype is not torch.float32
        or not lse.is_contiguous()
        or lse.device != plan.device
    ):
        raise ShapeError(
            f"lse is {describe(lse)}; the plan takes {list(shape)} torch.float32 contiguous on "
            f"{plan.device}"
        )


def check_attention(q: Tensor, kv: Tensor, plan: AttentionPlan, out: Tensor, phase: Phase) -> None:
    """Check tensors against the plan, in about a microsecond if they match.

    Raises:
        ShapeError: a shape, stride, dtype or device differs from the plan's.
    """
    if (
        q.shape == plan.q_shape
        and out.shape == plan.q_shape
        and kv.shape[2:] == plan.kv_shape
        and kv.shape[0] == 2
        and q.dtype is plan.dtype
        and kv.dtype is plan.kv_dtype
        and out.dtype is plan.dtype
        and (kv.is_contiguous() or (len(plan.kv_shape) == 2 and kv.stride(-1) == 1))
        and q.stride(-1) == 1
        and out.is_contiguous()
        and q.device == kv.device == out.device == plan.device
        and plan.problem.phase is phase
    ):
        return
    if plan.problem.phase is not phase:
        raise ShapeError(f"the plan is for {plan.problem.phase.value}, this is {phase.value}")
    shape = ", ".join(map(str, plan.kv_shape))
    cache = f"contiguous [2, N, {shape}]" if len(plan.kv_shape) == 3 else f"[2, T, {shape}]"
    raise ShapeError(
        f"q is {describe(q)}, out is {describe(out)}, kv is {describe(kv)}; the plan takes "
        f"q {list(plan.q_shape)} contiguous in its last dimension, out {list(plan.q_shape)} "
        f"contiguous, both {plan.dtype}, kv {cache} {plan.kv_dtype}, on {plan.device}"
    )


def check_scale(kv: Tensor, plan: AttentionPlan, kv_scale: Tensor | None) -> None:
    """Check that scales that fit the cache are given if and only if the plan's cache is quantized.

    Raises:
        ShapeError: the scales are missing, unexpected or of the wrong shape, dtype, stride or device.
    """
    kv_dtype = plan.problem.kv_dtype
    if kv_dtype is None and kv_scale is not None:
        raise ShapeError("kv_scale is given; the plan's cache is not quantized")
    if kv_dtype is not None and kv_scale is None:
        raise ShapeError(f"kv_scale is not given; the plan's cache is {kv_dtype}")
    if kv_scale is not None:
        _check_scale_of(kv, kv_scale)


def check_write(
    k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None
) -> None:
    """Check the arguments of `write_kv` against each other.

    Raises:
        ShapeError: a shape, stride, dtype or device does not fit the others.
    """
    quantized = kv.dtype is torch.float8_e4m3fn
    if (
        k.shape != v.shape
        or k.shape[1:] != kv.shape[3:]
        or kv.ndim != 5
        or kv.shape[0] != 2
        or slot_mapping.shape != k.shape[:1]
        or slot_mapping.dtype not in _SLOT_DTYPES
        or not slot_mapping.is_contiguous()
        or k.dtype is not (v.dtype if quantized else kv.dtype)
        or v.dtype not in (_WRITTEN_DTYPES if quantized else (kv.dtype,))
        or not kv.is_contiguous()
        or k.stride(-1) != 1
        or v.stride(-1) != 1
        or not k.device == v.device == slot_mapping.device == kv.device
    ):
        raise ShapeError(
            f"k is {describe(k)}, v is {describe(v)}, kv is {describe(kv)}, slot_mapping is "
            f"{describe(slot_mapping)}; expected k and v [T, K, D], kv contiguous "
            "[2, N, S, K, D], all of one dtype or kv torch.float8_e4m3fn, slot_mapping [T] int32 "
            "contiguous, on one device"
        )
    if (kv_scale is not None) is not quantized:
        given = "not given" if kv_scale is None else "given"
        raise ShapeError(f"kv_scale is {given}; the cache is {kv.dtype}")
    if kv_scale is not None:
        _check_scale_of(kv, kv_scale)


def _check_scale_of(kv: Tensor, kv_scale: Tensor) -> None:
    """Check scales against a cache kv [2, N, S, K, D]."""
    sides, blocks, size, heads = kv.shape[:4]
    if (
        kv_scale.shape != (sides, blocks, heads, size)
        or kv_scale.dtype is not torch.float32
        or not kv_scale.is_contiguous()
        or kv_scale.device != kv.device
    ):
        raise ShapeError(
            f"kv_scale is {describe(kv_scale)}; expected {[sides, blocks, heads, size]} torch.float32 "
            f"contiguous on {kv.device}"
        )


def describe(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype, device and contiguity for an error message."""
    text = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
    return text if tensor.is_contiguous() else f"{text} not contiguous"
