"""Attention of a layer on a CPU over the paged cache, in one call of the C library; see native/layer_attention.h.

A query's result depends on nothing but its sequence: neither on the others of the step nor on how a prompt is divided.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from kernels.attention.pytorch.common import check_blocks
from kernels.attention.pytorch.paged_host import blocks_needed, host_sequences
from kernels.cpu import workers
from kernels.cpu.decoder import CCache, CSequences

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.problem import AttentionProblem, PagedBatch
    from kernels.attention.select import Selection

_INT, _POINTER, _DOUBLE = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Attention(ctypes.Structure):
    """`Attention` of native/layer_attention.h."""

    _fields_ = (
        ("cache", CCache),
        ("sequences", CSequences),
        ("q", _POINTER),
        ("q_stride", _INT),
        ("out", _POINTER),
        ("rows", _INT),
        ("heads", _INT),
        ("scale", _DOUBLE),
        ("softcap", _DOUBLE),
        ("window", _INT),
    )


class CPUAttention:
    """Attention of one step; shapes as in `kernels.attention.functional`."""

    def __init__(
        self, problem: AttentionProblem, batch: PagedBatch, selection: Selection | None = None
    ) -> None:
        del selection
        # Raises ShapeError if the batch is inconsistent: the library checks nothing.
        self._needed = blocks_needed(host_sequences(problem, batch), problem)
        self._problem = problem
        tensors = batch.cu_seqlens_q, batch.seq_lens, batch.block_table
        self._held = tuple(it.contiguous() for it in tensors)
        count, columns = batch.block_table.shape
        self._sequences = CSequences(count, columns, 0, *(it.data_ptr() for it in self._held))

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        *,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write the attention of `q` over `kv` to `out`."""
        assert lse is None, "the row does not support it"
        assert kv_scale is None, "the row does not support it"
        check_blocks(kv, self._needed)
        it = self._problem
        if q.stride(2) != 1 or q.stride(1) != it.head_dim:
            q = q.contiguous()
        assert kv.is_contiguous()
        assert out.is_contiguous()
        cache = CCache(kv[0].data_ptr(), kv[1].data_ptr(), 0, *kv.shape[2:], 1)
        attention = _Attention(
            cache,
            self._sequences,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            len(q),
            it.num_heads,
            it.softmax_scale,
            it.softcap or 0.0,
            it.sliding_window or 0,
        )
        workers.call("tessera_attention", attention)
