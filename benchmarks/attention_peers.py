"""Times PyTorch's attention kernels, cuDNN's and FlashAttention-2, on the inputs of the attention benchmark.

Sequences of one length go through `scaled_dot_product_attention`. That function cannot express sequences of different
lengths, with a history or with a window: for these the operators that it dispatches to are called.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_inputs import time_call
from kernels.attention.problem import PackedBatch
from kernels.torch_private import packed_cudnn_attention, packed_flash_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.attention_inputs import Inputs

_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
_NEAR_PEER = 1e-2
"""Largest relative difference from a peer's output: both round to bf16 along the way."""


def time_peers(inputs: Inputs, out: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the TFLOP/s of PyTorch's backends, as entries of a record.

    A backend that does not support the problem is left out, and so is one whose output differs from `out`; the record
    names the latter.

    Args:
        inputs: packed.
        out: their attention, already compared with the reference.
        device: of the inputs.
    """
    figures: dict[str, float] = {}
    copies: list[str] = []
    differing: list[str] = []
    for name, backend in _BACKENDS.items():
        found = _dense(inputs, backend) if _is_dense(inputs) else _ragged(inputs, name)
        if found is None:
            continue
        call, copied = found
        with sdpa_kernel(backend):
            theirs = call().reshape(out.shape)
            difference = float((theirs - out).norm() / out.norm())
            if not difference <= _NEAR_PEER:
                print(f"{inputs.shape}: {name}'s output differs by {difference:.2g}")
                differing.append(name)
                continue
            timing = time_call(call, device)
        figures[name] = float(f"{inputs.shape.flops / timing.median / 1e6:.4g}")
        copies += [name] if copied else []
    record: dict[str, Any] = {"peer_tflops": figures}
    record |= {"peers_with_copied_heads": copies} if copies else {}
    return record | ({"peers_that_differ": differing} if differing else {})


def _is_dense(inputs: Inputs) -> bool:
    shape = inputs.shape
    return not (shape.lengths or shape.history or shape.window)


def _dense(inputs: Inputs, backend: SDPBackend) -> tuple[Callable[[], Tensor], bool] | None:
    """Prepare attention of sequences of one length, to be called under `sdpa_kernel(backend)`.

    Returns:
        The call, its output [B, S, H, D], and whether the keys are copied for each query head because the backend
        cannot share them; None if the backend supports neither.
    """
    shape = inputs.shape
    q = inputs.q.view(shape.batch, shape.length, shape.hq, shape.d).transpose(1, 2)
    k, v = (
        side.view(shape.batch, shape.length, shape.hkv, shape.d).transpose(1, 2)
        for side in inputs.kv
    )

    def attend(k: Tensor, v: Tensor, *, shared: bool) -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, enable_gqa=shared
        ).transpose(1, 2)

    for copied in (False, True):
        if copied:
            k, v = (side.repeat_interleave(shape.hq // shape.hkv, 1) for side in (k, v))
        call = functools.partial(attend, k, v, shared=not copied)
        with sdpa_kernel(backend):
            if _runs(call, f"{shape}: {backend.name}"):
                return call, copied
    return None


def _ragged(inputs: Inputs, name: str) -> tuple[Callable[[], Tensor], bool] | None:
    """Prepare attention of sequences of different lengths, as `_dense` does; its output is [T, H, D]."""
    shape, batch = inputs.shape, inputs.batch
    assert isinstance(batch, PackedBatch), "peers read packed keys"
    k, v = inputs.kv
    lengths = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k)

    def flash() -> Tensor:
        return packed_flash_attention(inputs.q, k, v, lengths, shape.window, causal=shape.causal)

    def cudnn() -> Tensor:
        return packed_cudnn_attention(inputs.q, k, v, lengths, causal=shape.causal)

    # cuDNN aligns the causal edge to the top left, which a history moves, and knows no window here.
    if name == "cudnn" and (shape.history or shape.window):
        return None
    call = cudnn if name == "cudnn" else flash
    return (call, False) if _runs(call, f"{shape}: {name}") else None


def _runs(call: Callable[[], Tensor], what: str) -> bool:
    try:
        call()
    except RuntimeError as error:
        print(f"{what}: {str(error).splitlines()[0][:160]}")
        return False
    return True
