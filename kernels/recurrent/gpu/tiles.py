"""Tiles of the tokens of prompts, which programs find in the lengths on the device, and functions of elements.

Nothing is read on the host, so a recorded step may have other lengths when it is replayed.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

FEWEST_SEQUENCES: Final = 256
"""Prompts for which kernels are compiled, enough for most steps; then for each larger power of two."""


def sequences(num_prompts: int) -> int:
    """Return the size of the vectors of all prompts."""
    return max(FEWEST_SEQUENCES, int(triton.next_power_of_2(num_prompts)))


@triton.jit
def find_tile(cu_seqlens, num_prompts, number, TOKENS: tl.constexpr, SEQS: tl.constexpr):
    """Return the prompt that has a tile, the prompt's first token and length, and the number of its tile.

    Tiles of TOKENS tokens begin at a prompt's first token. The prompt is `num_prompts` if there are fewer tiles.
    """
    it = tl.arange(0, SEQS)
    start = tl.load(cu_seqlens + it, mask=it < num_prompts, other=0)
    length = tl.load(cu_seqlens + it + 1, mask=it < num_prompts, other=0) - start
    return _find(it, start, length, (length + TOKENS - 1) // TOKENS, number, num_prompts)


@triton.jit
def find_block(cu_seqlens, positions, num_prompts, number, CHUNK: tl.constexpr, SEQS: tl.constexpr):
    """Return what `find_tile` does, of blocks that begin at multiples of CHUNK, and the first token's place in one.

    Args:
        cu_seqlens: as in `Segments`.
        positions: of the tokens of prompts.
        num_prompts: Q.
        number: of the block among those of the step.
        CHUNK: tokens of a block.
        SEQS: as of `sequences`.
    """
    it, start, length, begin, count = list_blocks(cu_seqlens, positions, num_prompts, CHUNK, SEQS)
    prompt, first, tokens, block = _find(it, start, length, count, number, num_prompts)
    return prompt, first, tokens, block, tl.sum(tl.where(it == prompt, begin, 0), 0)


@triton.jit
def find_prompt(
    cu_seqlens, positions, num_prompts, prompt, CHUNK: tl.constexpr, SEQS: tl.constexpr
):
    """Return a prompt's first token, length, place in its first block and number of blocks, and those of others before.

    The arguments are those of `find_block`, with the number of a prompt.
    """
    it, start, length, begin, count = list_blocks(cu_seqlens, positions, num_prompts, CHUNK, SEQS)
    mine = it == prompt
    first = tl.sum(tl.where(mine, start, 0), 0)
    tokens = tl.sum(tl.where(mine, length, 0), 0)
    place = tl.sum(tl.where(mine, begin, 0), 0)
    blocks = tl.sum(tl.where(mine, count, 0), 0)
    return first, tokens, place, blocks, tl.sum(tl.where(it < prompt, count, 0), 0)


@triton.jit
def list_blocks(cu_seqlens, positions, num_prompts, CHUNK: tl.constexpr, SEQS: tl.constexpr):
    """Return the numbers of prompts, their first tokens, lengths, places in the first block and numbers of blocks."""
    it = tl.arange(0, SEQS)
    start = tl.load(cu_seqlens + it, mask=it < num_prompts, other=0)
    length = tl.load(cu_seqlens + it + 1, mask=it < num_prompts, other=0) - start
    begin = (tl.load(positions + start, mask=length > 0, other=0) % CHUNK).to(tl.int32)
    count = tl.where(length > 0, (begin + length + CHUNK - 1) // CHUNK, 0)
    return it, start, length, begin, count


@triton.jit
def _find(it, start, length, count, number, num_prompts):
    prompt = tl.minimum(tl.sum((tl.cumsum(count, 0) <= number).to(tl.int32), 0), num_prompts)
    mine = it == prompt
    first = tl.sum(tl.where(mine, start, 0), 0)
    tokens = tl.sum(tl.where(mine, length, 0), 0)
    return prompt, first, tokens, number - tl.sum(tl.where(it < prompt, count, 0), 0)


@triton.jit
def slot_after(kept_slots, token, end, write):
    """Return the slot for the state after a token of a row with a draft, int64; negative for none.

    Args:
        kept_slots: as in `Segments`, of rows with drafts.
        token: its number in the step.
        end: the first token of the next row.
        write: the slot for the state after the row's last token.
    """
    return tl.load(kept_slots + token, mask=token + 1 < end, other=write).to(tl.int64)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)) of float32, exact for small results too."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    is_small = total == 1.0
    # The quotient undoes the rounding of the sum.
    exact = tl.log(total) * (small / tl.where(is_small, 1.0, total - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_small, small, exact)


@triton.jit
def is_last(counter, count):
    """Count a program's arrival after its loads and stores; return whether it is the last of `count`.

    The last one resets `counter`, for the next launch. What the others have loaded it may overwrite, and what they have
    stored it may load, past the L1 cache.
    """
    # All threads of this program precede its arrival.
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(counter, 0)
    return last
