"""The end of the whole-step kernel: the logits, their argmax and its log-probability.

Each program stores the largest key of its own logits, and the first program reduces these.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.step_constants import CONSUMER_WARPS, MOST_PROGRAMS, ROWS
from kernels.step.gpu.tensor_products import multiply, tensor_tiles_at_once
from kernels.step.gpu.vectors import rows_of_tile, tiles_of_program

LOWEST_KEY = gl.constexpr(-(2**63))
_MINUS_INFINITY = gl.constexpr(-0x7F800001)


@gluon.jit
def score_all(ring, logits, best, totals, used, c):
    """Compute and store this program's logits, their largest key and the sum of their exponentials."""
    EACH: gl.constexpr = tensor_tiles_at_once(c.HIDDEN, False, c.STAGES, 4)
    key = gl.full([ROWS], LOWEST_KEY, gl.int64, layout=gl.SliceLayout(1, c.W))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, c.W))
    count = tiles_of_program(gl.program_id(0), (c.VOCAB + ROWS - 1) // ROWS)
    for i in range(count // EACH):
        key, total, used = score(ring, logits, i * EACH, key, total, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            key, total, used = score(ring, logits, count - n, key, total, used, gl.constexpr(n), c)
    largest = gl.max(key, 0)
    gl.store(best + gl.program_id(0), largest)
    gl.store(totals + gl.program_id(0), gl.sum(total * exponentials(key, largest), 0))


@gluon.jit
def score(ring, logits, number, key, total, used, TILES: gl.constexpr, c):
    """Compute and store TILES tiles of logits; returns each warp's largest key and sum of exponentials so far."""
    sums, used = multiply(ring, used, c.HIDDEN, TILES, gl.constexpr(False), c)
    keys = ()
    largest = key
    for t in gl.static_range(TILES):
        row = rows_of_tile(gl.program_id(0), number + t, c)
        rounded = sums[t].to(logits.dtype.element_ty)
        ranked = ranking_keys(rounded.to(gl.float32), row)
        if c.VOCAB % ROWS == 0:
            gl.store(logits + row, rounded)
        else:
            gl.store(logits + row, rounded, mask=row < c.VOCAB)
            ranked = gl.where(row < c.VOCAB, ranked, LOWEST_KEY)
        keys = keys + (ranked,)  # type: ignore[assignment]
        largest = gl.maximum(largest, keys[t])
    total *= exponentials(key, largest)
    for t in gl.static_range(TILES):
        total += exponentials(keys[t], largest)
    return largest, total, used


@gluon.jit
def choose(best, totals, tokens, logprobs, sampled):
    """Reduce the programs' keys to the argmax of the logits; store its token and log-probability."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [CONSUMER_WARPS], [0])
    number = gl.arange(0, MOST_PROGRAMS, layout=layout)
    exists = number < gl.num_programs(0)
    keys = gl.load(best + number, mask=exists, other=LOWEST_KEY, cache_modifier=".cg")
    sums = gl.load(totals + number, mask=exists, other=0.0, cache_modifier=".cg")
    key = gl.max(keys, 0)
    chosen = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    bits = key >> 32
    finite = (bits < 0x7F800000) & (bits > -0x7F800001)
    gl.store(sampled, chosen)
    gl.store(tokens, gl.where(finite, chosen, -1))
    total = gl.sum(sums * exponentials(keys, key), 0)
    gl.store(logprobs, 0.0 - gl.log(gl.maximum(total, 1.0)))


@gluon.jit
def exponentials(keys, largest):
    """Like `kernels.gpu.functions.exponentials`, but of keys."""
    bits = (keys >> 32).to(gl.int32)
    return gl.where(bits > _MINUS_INFINITY, gl.exp(ranked_value(keys) - ranked_value(largest)), 0.0)


@gluon.jit
def ranked_value(key):
    """Return the float32 value in a key."""
    bits = (key >> 32).to(gl.int32)
    return gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(gl.float32, bitcast=True)


@gluon.jit
def ranking_keys(values, ids):
    """Like `kernels.gpu.functions.ranking_keys`."""
    values = gl.where(values == 0.0, 0.0, values)
    bits = values.to(gl.int32, bitcast=True)
    bits = gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = gl.where(values != values, 0x7FFFFFFF, bits)
    return (bits.to(gl.int64) << 32) | (0x7FFFFFFF - ids).to(gl.int64)
