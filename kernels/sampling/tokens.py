"""The public API of the operations at both ends of a model: embeddings of tokens, and tokens from logits."""

from __future__ import annotations

import functools
from collections.abc import Set

import torch
from torch import Tensor
from torch.nn import functional

from kernels.arch import GPUArch, detect
from kernels.gpu.dependent_launch import may_depend
from kernels.sampling.registry import REGISTRY, TRITON
from kernels.sampling.rows import (
    ENTROPY_SCALE,
    FILTERED,
    GREEDY,
    UNFILTERED,
    WEIGHT_SCALE,
    SampleRow,
    candidate_bounds,
)
from kernels.selection import VectorProblem, select_vector

__all__ = [
    "ENTROPY_SCALE", "FILTERED", "GREEDY", "UNFILTERED", "WEIGHT_SCALE", "SampleRow", "candidate_bounds",
    "chosen_logprobs", "sample_tokens", "embed_tokens", "has_kernels", "known_ids", "log_softmax", "argmax_tokens",
]  # fmt: skip


def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels of this package run on a device: from sm_80 on, as for attention."""
    return device.type == "cuda" and _has_kernels(detect(device))


@functools.cache
def _has_kernels(arch: GPUArch) -> bool:
    # The kernels read logits of any supported dtype.
    return select_vector(REGISTRY, VectorProblem("float32"), arch).spec is TRITON


def embed_tokens(ids: Tensor, table: Tensor, sampled: Tensor | None = None) -> Tensor:
    """Look up the embeddings of tokens without waiting for the device.

    Args:
        ids: [T] int64 contiguous, rows of `table`, or -1 - i for row `sampled[i]`.
        table: [V, C] contiguous.
        sampled: [R] int64 contiguous, rows of `table`; None where no id is below 0.

    Returns:
        [T, C], a new tensor.
    """
    if has_kernels(ids.device):
        # Imported here because Triton is not installed on every host.
        from kernels.sampling.gpu.embed import embed  # noqa: PLC0415

        return embed(ids, sampled, table, pdl=may_depend(detect(ids.device), ids.device))
    return functional.embedding(known_ids(ids, sampled), table)


def known_ids(ids: Tensor, sampled: Tensor | None = None) -> Tensor:
    """Return token ids [T] int64 with those of `sampled`, [R] int64, in place of -1 - i. Waits for no device."""
    if sampled is None:
        return ids
    return torch.where(ids < 0, sampled[(-1 - ids).clamp_min(0)], ids)


def argmax_tokens(
    logits: Tensor,
    tokens: Tensor | None = None,
    checked: Tensor | None = None,
    logprobs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the argmax of each row, the smallest id among equals, without waiting for the device.

    Can be captured in a CUDA graph.

    Args:
        logits: [R, V], R >= 1, float32, bfloat16 or float16, contiguous in V. Not changed.
        tokens: [R] int64 contiguous, written; None allocates it.
        checked: likewise.
        logprobs: [R] float32 contiguous, likewise.

    Returns:
        `tokens`, valid ids whatever the logits, NaN counting as the largest; `checked`, the same but -1 where the
        largest logit is not finite; and `logprobs`, their natural log-probabilities, arbitrary where `checked` is -1.
    """
    if tokens is None:
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if checked is None:
        checked = torch.empty_like(tokens)
    if logprobs is None:
        logprobs = torch.empty_like(tokens, dtype=torch.float32)
    if has_kernels(logits.device):
        # Imported here because Triton is not installed on every host.
        from kernels.sampling.gpu.argmax import argmax_tokens as compute  # noqa: PLC0415

        pdl = may_depend(detect(logits.device), logits.device)
        compute(logits, tokens, checked, logprobs, pdl=pdl)
        return tokens, checked, logprobs
    largest, argmax = logits.max(-1)
    tokens.copy_(argmax)
    # NaN minus NaN, and infinity minus infinity, are not 0.
    checked.copy_(torch.where(largest - largest == 0, argmax, -1))
    logprobs.copy_(chosen_logprobs(logits, tokens))
    return tokens, checked, logprobs


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the natural log-probability of one token of each row, without waiting for the device.

    Its bits depend on the row's logits alone.

    Args:
        logits: [R, V], float32, bfloat16 or float16, contiguous in V. Not changed.
        tokens: [R] int64 contiguous, in [0, V).

    Returns:
        [R] float32; arbitrary where the row's largest logit is not finite.
    """
    if not has_kernels(logits.device):
        return log_softmax(logits.float()).gather(1, tokens[:, None])[:, 0]
    # Imported here because Triton is not installed on every host.
    from kernels.sampling.gpu.argmax import chosen_logprobs as compute  # noqa: PLC0415

    logprobs = torch.empty_like(tokens, dtype=torch.float32)
    pdl = may_depend(detect(logits.device), logits.device)
    compute(logits, tokens, logprobs, pdl=pdl)
    return logprobs


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities [n, V] float32 whose bits do not depend on a row's place in the batch.

    Args:
        logits: [n, V] float32.
    """
    size = logits.shape[1]
    if logits.device.type != "cpu" and size % 4:
        # CUDA's kernel splits a row's sum by the row's 16-byte alignment, which differs between rows here.
        logits = functional.pad(logits, (0, -size % 4), value=-torch.inf)
    return torch.log_softmax(logits, dim=-1)[:, :size]


def sample_tokens(
    logits: Tensor, table: Tensor, kinds: Set[int], masks: Tensor, tokens: Tensor, checked: Tensor
) -> None:
    """Sample a token for each of some rows without waiting for the device; needs `has_kernels`.

    Args:
        logits: [M, V], float32, bfloat16 or float16, contiguous in V. Not changed.
        table: [R, fields of `SampleRow`] float64 contiguous, R >= 1; the targets are distinct.
        kinds: of the rows.
        masks: [K, ceil(V / 32)] int32 contiguous, K >= 0, which the rows refer to: bit i % 32 of word i // 32 is 1
            where token i may be sampled. A banned logit that is NaN or plus infinity still makes its row fail.
        tokens: [N] int64 contiguous, written at the rows' targets; valid ids whatever the logits.
        checked: [N] int64 contiguous, likewise; the same, but -1 where the largest logit is not finite.
    """
    # Imported here because Triton is not installed on every host.
    from kernels.sampling.gpu.sample_tokens import sample_tokens as sample  # noqa: PLC0415

    pdl = may_depend(detect(logits.device), logits.device)
    sample(logits, table, masks, kinds, tokens, checked, pdl=pdl)
