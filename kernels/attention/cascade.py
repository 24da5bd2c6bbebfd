"""Cascade attention on the host: reads the prefix that a decode's sequences share once for all of them.

A decode step whose sequences begin with the same blocks, such as those of one system prompt, computes its
attention in three launches instead of one (`kernels/attention/portable/cascade_decode.py`). This module decides
which problems support it, makes the batch of the second launch, and estimates when the cascade is faster.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import torch

from kernels.arch import CATALOGUE, GPUArch
from kernels.attention.problem import AttentionProblem, PagedBatch, Phase
from kernels.attention.registry import PREFIX_REGISTRY
from kernels.attention.select import Selection, select
from kernels.errors import NoKernelError, ShapeError

_logger = logging.getLogger(__name__)

_MORE_LAUNCHES = 2
_LAUNCH_SECONDS = 15e-6
"""Time of an additional launch, on the host or on the GPU, whichever bounds the step."""
_PARTIAL_BYTES = 2 * 2 * 4
"""Per output element, at least: the results of prefix and rest are float32, written and read once."""
_FASTEST_GBS = max(arch.memory_bandwidth_gbs for arch in CATALOGUE.values())
"""Bandwidth assumed for an unknown GPU. It is the conservative choice: with it, rereading takes the least time."""


def prefix_problem(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem of all query tokens of a decode attending to the shared tokens."""
    # No row depends on max_query_tokens here; the kernel takes the number of query tokens from the batch.
    return dataclasses.replace(problem, causal=False, lse=True, max_query_tokens=1)


@functools.lru_cache(maxsize=256)
def prefix_selection(problem: AttentionProblem, arch: GPUArch) -> Selection | None:
    """Choose the kernel for the shared tokens of a decode, and log the choice once.

    Returns:
        None if no row supports them, so that each sequence reads them itself: on a CPU; with a sliding window,
            whose lower edge may lie within the prefix; and for a batch-invariant problem, since the length of the
            prefix depends on the batch.
    """
    if problem.phase is not Phase.DECODE:
        return None
    try:
        selection = select(prefix_problem(problem), arch, PREFIX_REGISTRY)
    except NoKernelError as error:
        _logger.debug("every sequence reads the shared prefix: %s", error)
        return None
    _logger.debug("shared prefixes are read once: %s", selection.why)
    return selection


def takes_shared_prefix(problem: AttentionProblem, arch: GPUArch) -> bool:
    """Whether plans for a problem use `PagedBatch.shared_prefix`."""
    return prefix_selection(problem, arch) is not None


def check_prefix(batch: PagedBatch, block_size: int) -> None:
    """Check a batch's shared prefix against the bounds that are known on the host.

    Raises:
        ShapeError: the prefix is not a multiple of the block size, or is at least as long as the longest sequence.
    """
    prefix, columns = batch.shared_prefix, batch.block_table.shape[-1] * block_size
    if prefix and (prefix % block_size or not 0 < prefix < min(batch.max_seqlen_k, columns)):
        raise ShapeError(
            f"shared_prefix is {prefix}; it must be 0 or a multiple of the block size {block_size} "
            f"below max_seqlen_k {batch.max_seqlen_k} and the {columns} tokens of a block table's row"
        )


def rest_of(batch: PagedBatch, block_size: int) -> PagedBatch:
    """Return the batch without its shared tokens; lengths are computed on the device, empty sequences stay empty."""
    prefix = batch.shared_prefix
    return dataclasses.replace(
        batch,
        seq_lens=torch.clamp_min(batch.seq_lens - prefix, 0),
        block_table=batch.block_table[:, prefix // block_size :],
        max_seqlen_k=batch.max_seqlen_k - prefix,
        shared_prefix=0,
    )


def shared_prefix_is_faster(
    problem: AttentionProblem, arch: GPUArch, num_seqs: int, num_tokens: int
) -> bool:
    """Whether reading shared tokens once saves more time than the two additional launches take.

        (B - 1) * tokens * bytes of a token's keys and values      not read again
          > 16 * B * H * D bytes                                   partial results, written and read
          + bandwidth * 2 launches * 15 us                         not transferred during the launches

    Args:
        problem: the decode.
        arch: the processor.
        num_seqs: B, each with one query token.
        num_tokens: tokens that all sequences share.
    """
    if prefix_selection(problem, arch) is None:
        return False
    token_bytes = 2 * problem.num_kv_heads * problem.row_bytes
    saved = (num_seqs - 1) * num_tokens * token_bytes
    partial = _PARTIAL_BYTES * num_seqs * problem.num_heads * problem.head_dim
    bandwidth = 1e9 * (arch.memory_bandwidth_gbs or _FASTEST_GBS)
    return saved > partial + bandwidth * _MORE_LAUNCHES * _LAUNCH_SECONDS
