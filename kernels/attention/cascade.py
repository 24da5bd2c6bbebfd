"""When and how a decode reads once what its sequences share; pure.

A step whose sequences begin with the same blocks, as those behind one system prompt do, has its
attention in three launches instead of one (`kernels/attention/gpu/cascade_decode.py`). Here is which
problems can have that, what the second launch is given, and when it pays. Knows no kernel's inside.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

import torch

from kernels.arch import CATALOGUE
from kernels.attention.problem import Phase, select
from kernels.attention.registry import PREFIX_REGISTRY
from kernels.errors import NoKernelError, ShapeError
from kernels.tuning import tuned_launches

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.attention.problem import AttentionProblem, PagedBatch, Selection

_logger = logging.getLogger(__name__)

_MORE_LAUNCHES = 2
_LAUNCH_SECONDS = 15e-6
"""What a further launch costs: of the host's time, where that bounds a step, or of the GPU's."""
_PARTIAL_BYTES = 2 * 2 * 4
"""Per output element, at least: the results of prefix and rest are written and read as float32."""
_FASTEST_GBS = max(arch.memory_bandwidth_gbs for arch in CATALOGUE.values())
"""Taken for a GPU whose bandwidth is not known: reading again costs the least there."""


def prefix_problem(problem: AttentionProblem) -> AttentionProblem:
    """Describe the attention of all tokens of a decode to the shared ones."""
    # The number of tokens is that of the batch, which no problem knows: nothing is chosen by it.
    return dataclasses.replace(problem, causal=False, lse=True, max_query_tokens=1)


@functools.lru_cache(maxsize=256)
def prefix_selection(problem: AttentionProblem, arch: GPUArch) -> Selection | None:
    """Choose the kernel for the shared tokens of a decode, and say so once.

    Returns:
        None where no row takes them: then each sequence reads its own, as on a CPU; under a window,
            whose lower edge may lie among them; for a batch-invariant problem, since what is shared
            depends on the batch.
    """
    if problem.phase is not Phase.DECODE:
        return None
    try:
        selection = select(prefix_problem(problem), arch, PREFIX_REGISTRY, tuned_launches)
    except NoKernelError as error:
        _logger.debug("every sequence reads the prefix that it shares: %s", error)
        return None
    _logger.debug("shared prefixes are read once: %s", selection.why)
    return selection


def takes_shared_prefix(problem: AttentionProblem, arch: GPUArch) -> bool:
    """Whether a `PagedBatch.shared_prefix` is of any use to a problem."""
    return prefix_selection(problem, arch) is not None


def check_prefix(batch: PagedBatch, block_size: int) -> None:
    """Compare what a batch promises to share with its bounds, which the host knows.

    Raises:
        ShapeError: it cannot be true.
    """
    prefix, columns = batch.shared_prefix, batch.block_table.shape[-1] * block_size
    if prefix and (prefix % block_size or not 0 < prefix < min(batch.max_seqlen_k, columns)):
        raise ShapeError(
            f"shared_prefix is {prefix}; it must be 0 or a multiple of the block size {block_size} "
            f"below max_seqlen_k {batch.max_seqlen_k} and the {columns} tokens of a block table's row"
        )


def rest_of(batch: PagedBatch, block_size: int) -> PagedBatch:
    """Return the batch without its shared tokens, made on the device; sequences without any stay so."""
    prefix = batch.shared_prefix
    return dataclasses.replace(
        batch,
        seq_lens=torch.clamp_min(batch.seq_lens - prefix, 0),
        block_table=batch.block_table[:, prefix // block_size :],
        max_seqlen_k=batch.max_seqlen_k - prefix,
        shared_prefix=0,
    )


def shared_prefix_pays(
    problem: AttentionProblem, arch: GPUArch, num_seqs: int, num_tokens: int
) -> bool:
    """Whether reading shared tokens once saves more than the further launches cost.

        (B - 1) * tokens * bytes of a token's keys and values      not read again
          > 16 * B * H * D bytes                                   partial results, written and read
          + bandwidth * 2 launches * 15 us                         what memory could have sent meanwhile

    Args:
        problem: of the decode.
        arch: where.
        num_seqs: B, each with one query token.
        num_tokens: that all of them share.
    """
    if prefix_selection(problem, arch) is None:
        return False
    token_bytes = 2 * problem.num_kv_heads * problem.row_bytes
    saved = (num_seqs - 1) * num_tokens * token_bytes
    partial = _PARTIAL_BYTES * num_seqs * problem.num_heads * problem.head_dim
    bandwidth = 1e9 * (arch.memory_bandwidth_gbs or _FASTEST_GBS)
    return saved > partial + bandwidth * _MORE_LAUNCHES * _LAUNCH_SECONDS
