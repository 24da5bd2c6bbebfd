"""Multiplying warp of the Blackwell prefill: issues the tcgen05 products of both softmax groups.

For each key tile it issues the output product (P V) of a group's previous tile, then the score product (Q K^T) of its
next one, and then those of the other group. The tensor cores execute them in this order, so that one group computes
exponentials while the products of the other one run.

Source: Zadouri et al., "FlashAttention-4", 2026, for the order of the products.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from kernels.attention.blackwell.pipeline import (
    ROWS,
    fence_after_wait,
    next_item,
    tiles_of_group,
    weights_of,
)
from kernels.attention.hopper.pipeline import key_range


@gluon.jit
def multiply_items(pipe, window, c):
    """Issue the products of every item."""
    done = 0
    used = 0
    queries = 0
    first_used = 0
    second_used = 0
    head, first_row, _, q_len, num_keys = next_item(pipe, done, 1)
    while head >= 0:
        tiles = key_range(first_row, q_len, num_keys, window, c)
        count = tiles[1]
        if count > 0:
            first_passed, _, first_count, _, _ = tiles_of_group(
                tiles, first_row, q_len, num_keys, window, c
            )
            second_passed, _, second_count, _, _ = tiles_of_group(
                tiles, first_row + ROWS, q_len, num_keys, window, c
            )
            mbarrier.wait(pipe.q_full.index(0), queries & 1)
            for i in range(count + 1):
                multiply_tile(
                    pipe, i, i - first_passed, first_count, used, first_used, gl.constexpr(0), c
                )
                multiply_tile(
                    pipe, i, i - second_passed, second_count, used, second_used, gl.constexpr(1), c
                )
                if i < count:
                    tcgen05_commit(pipe.k_empty.index((used + i) % c.STAGES))
                if i > 0:
                    tcgen05_commit(pipe.v_empty.index((used + i - 1) % c.STAGES))
                if i == count - 1:
                    tcgen05_commit(pipe.q_empty.index(0))
            used += count
            queries += 1
            first_used += first_count
            second_used += second_count
        done += 1
        head, first_row, _, q_len, num_keys = next_item(pipe, done, 1)


@gluon.jit
def multiply_tile(pipe, i, mine, count, used, my_used, INDEX: gl.constexpr, c):
    """Issue the output product of group `INDEX` for its tile `mine - 1`, then its score product for tile `mine`.

    Args:
        i: number of tile `mine` among the item's tiles.
        mine: number of that tile among the group's tiles, of which it has `count`.
        used: tiles of the ring that earlier items have used.
        my_used: tiles that the group had in earlier items.
    """
    if (mine > 0) & (mine <= count):
        tile = used + i - 1
        buffer = tile % c.STAGES
        mbarrier.wait(pipe.v_full.index(buffer), (tile // c.STAGES) & 1)
        mbarrier.wait(pipe.p_full.index(INDEX), (my_used + mine - 1) & 1)
        fence_after_wait()
        tcgen05_mma(
            weights_of(pipe.scores.index(INDEX), pipe.q.dtype),
            pipe.v.index(buffer),
            pipe.outputs.index(INDEX),
            use_acc=mine > 1,
            mbarriers=[pipe.o_full.index(INDEX)],
        )
    if (mine >= 0) & (mine < count):
        tile = used + i
        buffer = tile % c.STAGES
        mbarrier.wait(pipe.k_full.index(buffer), (tile // c.STAGES) & 1)
        tcgen05_mma(
            pipe.q.index(INDEX),
            pipe.k.index(buffer).permute((1, 0)),
            pipe.scores.index(INDEX),
            use_acc=False,
            mbarriers=[pipe.s_full.index(INDEX)],
        )
