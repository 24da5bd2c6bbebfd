"""Times PyTorch's attention on the inputs of the attention benchmark: cuDNN, FlashAttention-2, standard attention.

Sequences of one length use `scaled_dot_product_attention`. That function does not support different lengths, a history
or a window; for these, the operators that it dispatches to are called directly.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_inputs import peak_mib, time_call
from kernels.attention.problem import PackedBatch
from kernels.torch_private import packed_cudnn_attention, packed_flash_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.attention_inputs import Inputs

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}
"""`math` is standard attention, which needs memory for all scores."""
_NEAR_PEER = 1e-2
"""Largest relative difference from a peer's output: both round intermediate results to bf16."""


def time_peers(inputs: Inputs, out: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the TFLOP/s of PyTorch's backends and the peak of their memory, as entries of a record.

    A backend is left out if it does not support the problem, if its output differs from `out`, or if it needs more
    memory than there is; in the last two cases the record names it.

    Args:
        inputs: packed inputs.
        out: their attention, already compared with the reference.
        device: device of the inputs.
    """
    figures: dict[str, float] = {}
    peaks: dict[str, float | None] = {}
    lists: dict[str, list[str]] = {
        "peers_with_copied_heads": [], "peers_that_differ": [], "peers_out_of_memory": [],
    }  # fmt: skip
    for name, backend in _BACKENDS.items():
        try:
            found = _dense(inputs, backend) if _is_dense(inputs) else _ragged(inputs, name)
            if found is None:
                continue
            call, copied = found
            with sdpa_kernel(backend):
                difference = _difference(call(), out)
                if not difference <= _NEAR_PEER:
                    print(f"{inputs.shape}: {name}'s output differs by {difference:.2g}")
                    lists["peers_that_differ"].append(name)
                    continue
                peaks[name] = peak_mib(call, device)
                timing = time_call(call, device)
        except torch.OutOfMemoryError:
            print(f"{inputs.shape}: {name} does not fit in memory")
            lists["peers_out_of_memory"].append(name)
            continue
        figures[name] = float(f"{inputs.shape.flops / timing.median / 1e6:.4g}")
        lists["peers_with_copied_heads"] += [name] if copied else []
    named = {key: names for key, names in lists.items() if names}
    return {"peer_tflops": figures, "peer_peak_mib": peaks} | named


def _difference(theirs: Tensor, out: Tensor) -> float:
    return float((theirs.reshape(out.shape) - out).norm() / out.norm())


def _is_dense(inputs: Inputs) -> bool:
    shape = inputs.shape
    return not (shape.lengths or shape.history or shape.window)


def _dense(inputs: Inputs, backend: SDPBackend) -> tuple[Callable[[], Tensor], bool] | None:
    """Prepare attention of sequences of one length. The caller must run it under `sdpa_kernel(backend)`.

    Returns:
        The call, which returns [B, S, H, D], and whether keys and values are copied for each query head because the
        backend does not support grouped-query attention. None if the backend supports neither.
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
    """Prepare attention of sequences of different lengths. Returns the same as `_dense`; the output is [T, H, D]."""
    shape, batch = inputs.shape, inputs.batch
    assert isinstance(batch, PackedBatch), "peers read packed keys"
    k, v = inputs.kv
    lengths = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k)

    def flash() -> Tensor:
        return packed_flash_attention(inputs.q, k, v, lengths, shape.window, causal=shape.causal)

    def cudnn() -> Tensor:
        return packed_cudnn_attention(inputs.q, k, v, lengths, causal=shape.causal)

    # cuDNN aligns the causal mask to the top left, which is wrong with a history, and this operator has no window.
    if name == "math" or (name == "cudnn" and (shape.history or shape.window)):
        return None
    call = cudnn if name == "cudnn" else flash
    return (call, False) if _runs(call, f"{shape}: {name}") else None


def _runs(call: Callable[[], Tensor], what: str) -> bool:
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        print(f"{what}: {str(error).splitlines()[0][:160]}")
        return False
    return True
