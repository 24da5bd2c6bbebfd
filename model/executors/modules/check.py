"""Compares the first tokens of a model with what its modules compute with the attention of their own library.

What attention does not read, the probe refuses. This finds what it cannot see: mixing of tokens elsewhere than in
attention, and values that depend on the other tokens of a step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from kernels import PagedBatch
from model.device.kv_cache import KVCache
from model.executors.layers.attention_plans import attention_planner
from model.executors.modules.interface import STEPS, unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from model.executors.modules.executor import ModulesExecutor
    from model.network.parameters import DecoderParameters

_CHUNKS: Final = ((5, 1), (18, 1), (1, 10))
"""The tokens of each of two sequences in each step: prompts, chunks of them and decode rows, with each other."""
_MOST_ERROR: Final = 1e-3
_MOST_ERROR_OF_HALVES: Final = 0.2
"""The largest difference of scores, relative to how much they vary: of any token in float32; of most tokens in other
dtypes, in which the experts of a few may be others."""


@torch.inference_mode()
def check_modules(
    model: DecoderParameters,
    executor: ModulesExecutor,
    library: Any,  # noqa: ANN401 - the library's
    block_size: int,
) -> None:
    """Check that chunks of several sequences have the scores of whole sequences.

    Args:
        model: with its weights.
        executor: of its steps.
        library: the model of the library.
        block_size: tokens in a block of the cache.

    Raises:
        UnsupportedModelError: the scores differ.
    """
    device, vocab = model.device, model.network.vocab
    totals = (min(sum(counts), model.max_context) for counts in zip(*_CHUNKS, strict=True))
    sequences = [
        ((torch.arange(total) + seed) * 7919 % vocab).to(device)
        for seed, total in enumerate(totals, start=1)
    ]
    library.set_attn_implementation("eager")
    try:
        expected = [library(input_ids=it[None], use_cache=False).logits[0] for it in sequences]
    except Exception as error:  # code of the library, of any model
        raise unsupported(type(library).__name__, [f"modules that fail: {error}"]) from error
    finally:
        library.set_attn_implementation(STEPS)
    found = _in_chunks(model, executor, sequences, block_size)
    in_float32 = model.dtype is torch.float32
    errors = _differences(torch.cat(found).float(), torch.cat(expected).float())
    largest = (errors.max() if in_float32 else errors.median()).item()
    # Scores that are not finite numbers are reported by the engine, with what to do.
    if math.isfinite(largest) and largest > (_MOST_ERROR if in_float32 else _MOST_ERROR_OF_HALVES):
        raise unsupported(
            type(library).__name__,
            [
                f"other scores for chunks of several sequences than for a whole one (by {largest:.2g})"
            ],
        )


def _differences(found: Tensor, expected: Tensor) -> Tensor:
    """Return the difference of the scores of each token relative to how much they vary."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    differences: Tensor = (found - expected).norm(dim=-1) / spread
    return differences


def _in_chunks(
    model: DecoderParameters,
    executor: ModulesExecutor,
    sequences: Sequence[Tensor],
    block_size: int,
) -> list[Tensor]:
    """Return the logits [tokens, V] of sequences, computed in chunks."""
    device = model.device
    longest = max(map(len, sequences))
    columns = -(-longest // block_size)
    state = model.network.state(model.dtype)
    cache = KVCache(state, len(sequences) * columns, block_size, device)
    # The blocks of a sequence are not adjacent.
    blocks = torch.arange(cache.num_blocks, dtype=torch.int32, device=device)
    tables = blocks.view(columns, -1).T.contiguous()
    executor.reserve_positions(longest)
    planner = attention_planner(model)
    ends = [0] * len(sequences)
    found: list[list[Tensor]] = [[] for _ in sequences]
    for counts in _CHUNKS:
        starts = ends
        ends = [
            min(start + count, len(it))
            for start, count, it in zip(starts, counts, sequences, strict=True)
        ]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        decode, prompts = (
            [at for at, length in enumerate(lengths) if (length == 1) == is_one and length]
            for is_one in (True, False)
        )
        ordered = [*decode, *prompts]
        if not ordered:
            continue
        positions = [torch.arange(starts[at], ends[at], device=device) for at in ordered]
        slots = [
            tables[at, it // block_size] * block_size + it % block_size
            for at, it in zip(ordered, positions, strict=True)
        ]
        metadata = planner.metadata(
            torch.cat(slots).int(),
            block_size,
            _batch(decode, lengths, ends, tables),
            _batch(prompts, lengths, ends, tables),
        )
        ids = torch.cat([sequences[at][starts[at] : ends[at]] for at in ordered])
        logits = executor.logits(ids, torch.cat(positions), cache, metadata)
        for at, part in zip(
            ordered, logits.split_with_sizes([lengths[at] for at in ordered]), strict=True
        ):
            found[at].append(part)
    return [torch.cat(it) for it in found]


def _batch(
    members: list[int], lengths: Sequence[int], ends: Sequence[int], tables: Tensor
) -> PagedBatch | None:
    """Return the batch of some sequences; None for none."""
    if not members:
        return None
    device = tables.device
    counts, seen = [lengths[at] for at in members], [ends[at] for at in members]
    return PagedBatch(
        torch.tensor([0, *counts], device=device).cumsum(0).int(),
        torch.tensor(seen, dtype=torch.int32, device=device),
        tables[members].contiguous(),
        num_tokens=sum(counts),
        max_seqlen_q=max(counts),
        max_seqlen_k=max(seen),
    )
