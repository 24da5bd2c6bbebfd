"""Wrappers of PyTorch names outside its public API. A test checks that no other file uses such names.

Each docstring says what the public API lacks. Used with PyTorch 2.11 to 2.13.
"""
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

without_torch_function: Final = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass of Tensor whose operators return plain tensors; see "Extending PyTorch"."""


def has_bfloat16_instructions() -> bool:
    """Whether the CPU is an x86 with AVX-512 or AMX instructions for bfloat16.

    PyTorch 2.13 reports it by the public `torch.cpu.get_capabilities`; 2.11 does not.
    """
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def onednn_has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this CPU; no public function reports it.

    A build of PyTorch without oneDNN has no such operator.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def onednn_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Copy a weight to oneDNN's blocked layout and bind it.

    PyTorch's compiler emits these operators for frozen weights; without `torch.compile` no public API uses them.

    Args:
        weight: [out, in] float32 or bfloat16 on the CPU.
        bias: [out] or None.

    Returns:
        [..., in] -> [..., out]; not differentiable.
    """
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, blocked, bias, "none", [], "")


def fbgemm_half_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Copy a float32 weight to FBGEMM's blocked float16 layout and bind it, as `onednn_linear` does.

    Activations and sums are float32. The public module over these operators, `torch.ao.nn.quantized.dynamic.Linear`,
    is deprecated.
    """
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: multiply(x, packed)


def cpu_attention_with_lse(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend on the CPU and return the log-sum-exp too, which `scaled_dot_product_attention` does not return.

    Args:
        q: [B, H, Q, D].
        k: [B, H, K, D].
        v: [B, H, K, D].
        scale: of the scores.

    Returns:
        The output [B, H, Q, D] and the log-sum-exp [B, H, Q].
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, scale=scale)  # type: ignore[no-any-return]


def multiply_fp8(x: Tensor, weight: Tensor, rows: Tensor, columns: Tensor, out: Tensor) -> None:
    """Multiply FP8 matrices; the public `torch.nn.functional.scaled_mm` takes no `out`.

    Args:
        x: [M, K] float8.
        weight: [K, N] float8, column-major.
        rows: [M, 1] float32, scales of x.
        columns: [1, N] float32, scales of the weight.
        out: [M, N]; written.
    """
    # Fast accumulation keeps only 14 bits of a sum.
    torch._scaled_mm(x, weight, rows, columns, out_dtype=out.dtype, use_fast_accum=False, out=out)


def packed_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[Any], window: int | None, *, causal: bool
) -> Tensor:
    """Attend with PyTorch's build of FlashAttention-2; `torch.nn.attention.varlen` does not let the caller choose it.

    Args:
        q: [T, H, D], sequences one after the other.
        k: [U, K, D], likewise.
        v: [U, K, D].
        lengths: `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`, `max_seqlen_k`.
        window: tokens that a query attends to, its own included; None for all.
        causal: whether a query sees no key after its own token.

    Returns:
        [T, H, D].
    """
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    attend = torch.ops.aten._flash_attention_forward
    return attend(q, k, v, *lengths, 0.0, causal, False, **sides)[0]  # type: ignore[no-any-return]


def packed_cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[Any], *, causal: bool
) -> Tensor:
    """Attend with cuDNN; otherwise like `packed_flash_attention`, without windows."""
    attend = torch.ops.aten._cudnn_attention_forward
    return attend(q, k, v, None, *lengths, False, 0.0, causal, False)[0]  # type: ignore[no-any-return]


def share_memory(num_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
    """Allocate zeroed memory that all ranks of the default process group can access; they must all call it.

    No public API allocates such memory in PyTorch 2.11 to 2.13.

    Args:
        num_bytes: on each rank.
        device: the GPU of this rank.

    Returns:
        This rank's memory, uint8, which must be kept; and the addresses, on this rank, of that of each rank.

    Raises:
        RuntimeError: the GPUs cannot access each other's memory.
    """
    from torch.distributed import _symmetric_memory  # noqa: PLC0415 - not every build of PyTorch has it

    memory = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
    memory.zero_()
    # The other ranks may write to it as soon as they have its address.
    torch.cuda.synchronize(device)
    handle = _symmetric_memory.rendezvous(memory, torch.distributed.group.WORLD)  # type: ignore[arg-type]  # is set
    return memory, list(handle.buffer_ptrs)


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all tensors in place in a few launches; the operator is public only inside `torch.optim`."""
    torch._foreach_mul_(list(tensors), factor)


def add_all(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float) -> None:
    """Add `factor` times the other tensors in place, in a few launches."""
    torch._foreach_add_(list(tensors), list(others), alpha=factor)


def cpu_features() -> frozenset[str]:
    """Names of the CPU's instruction sets, as `torch.cpu.get_capabilities` of PyTorch 2.13 gives them.

    PyTorch 2.11 lacks that function; its internal C function has the same result.
    """
    found = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return frozenset(name for name, has in found.items() if has is True)
