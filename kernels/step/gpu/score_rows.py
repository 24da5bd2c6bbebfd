"""The end of the whole-step kernel for one or several rows: their logits, the argmax of each and its log-probability.

Each program stores the largest key of its own logits of each row, and the first program reduces these.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.products_of_rows import (
    multiply,
    outputs_of_tile,
    row_tiles_at_once,
    sum_layout,
)
from kernels.step.gpu.score import LOWEST_KEY, exponentials, ranking_keys
from kernels.step.gpu.step_constants import CONSUMER_WARPS, MOST_PROGRAMS, ROWS, SUMS
from kernels.step.gpu.vectors import tiles_of_program


@gluon.jit
def score_rows(ring, logits, best, totals, used, c):
    """Compute and store this program's logits, their largest keys and the sums of their exponentials."""
    EACH: gl.constexpr = row_tiles_at_once(c.HIDDEN, c.STAGES)
    layout: gl.constexpr = gl.SliceLayout(0, sum_layout())
    key = gl.full([SUMS], LOWEST_KEY, gl.int64, layout=layout)
    total = gl.zeros([SUMS], gl.float32, layout=layout)
    count = tiles_of_program(gl.program_id(0), (c.VOCAB + ROWS - 1) // ROWS)
    for i in range(count // EACH):
        key, total, used = score_tiles(ring, logits, i * EACH, key, total, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            key, total, used = score_tiles(
                ring, logits, count - n, key, total, used, gl.constexpr(n), c
            )
    keys = gl.reshape(key, [ROWS, ROWS])
    largest = gl.max(keys, 1)
    weights = exponentials(keys, largest[:, None])
    total = gl.sum(gl.reshape(total, [ROWS, ROWS]) * weights, 1)
    row = gl.arange(0, ROWS, layout=largest.type.layout)
    place = row * MOST_PROGRAMS + gl.program_id(0)
    gl.store(best + place, largest, mask=row < c.BATCH)
    gl.store(totals + place, total, mask=row < c.BATCH)


@gluon.jit
def score_tiles(ring, logits, number, key, total, used, TILES: gl.constexpr, c):
    """Compute and store TILES tiles of logits; returns the largest key and the sum of exponentials of each place."""
    sums, used = multiply(ring, used, c.HIDDEN, TILES, gl.constexpr(False), c)
    row, output = outputs_of_tile()
    largest = key
    for t in gl.static_range(TILES):
        token = (gl.program_id(0) + (number + t) * gl.num_programs(0)) * ROWS + output
        exists = (row < c.BATCH) & (token < c.VOCAB)
        rounded = sums[t].to(logits.dtype.element_ty)
        gl.store(logits + (row.to(gl.int64) * c.VOCAB + token), rounded, mask=exists)
        ranked = gl.where(exists, ranking_keys(rounded.to(gl.float32), token), LOWEST_KEY)
        # Tile by tile, so that the order does not depend on how many are multiplied at once.
        highest = gl.maximum(largest, ranked)
        total = gl.fma(total, exponentials(largest, highest), exponentials(ranked, highest))
        largest = highest
    return largest, total, used


@gluon.jit
def choose_rows(best, totals, tokens, logprobs, sampled, sampled_rows, c):
    """Reduce the programs' keys to the argmax of each sequence's logits; store its token and log-probability."""
    # A warp has a whole row, so the order of a sum does not depend on how many rows there are.
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [CONSUMER_WARPS, 1], [1, 0])
    row = gl.arange(0, c.BATCH, layout=gl.SliceLayout(1, layout))
    number = gl.arange(0, MOST_PROGRAMS, layout=gl.SliceLayout(0, layout))[None, :]
    place = row[:, None] * MOST_PROGRAMS + number
    exists = (number < gl.num_programs(0)) & (place >= 0)
    keys = gl.load(best + place, mask=exists, other=LOWEST_KEY, cache_modifier=".cg")
    sums = gl.load(totals + place, mask=exists, other=0.0, cache_modifier=".cg")
    key = gl.max(keys, 1)
    chosen = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    bits = key >> 32
    finite = (bits < 0x7F800000) & (bits > -0x7F800001)
    gl.store(sampled + gl.load(sampled_rows + row), chosen)
    gl.store(tokens + row, gl.where(finite, chosen, -1))
    total = gl.sum(sums * exponentials(keys, key[:, None]), 1)
    gl.store(logprobs + row, 0.0 - gl.log(gl.maximum(total, 1.0)))
