"""Attention in the whole-step kernel: each row's keys split over the programs.

A line of lanes attends two keys of each stage and keeps its own maximum, so that lines exchange nothing before a split
is done. The splits of a row depend on its position alone, and a key has the same place in them whether an earlier step
or this one computed it: keys of this step are written to the stages that have arrived (`add_step_keys`). A program
attends one split of one row, or several of one of several rows; `kernels.step.gpu.merge_splits` merges them.

Source: Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.fp8 import SCALE_EXPONENT, SCALE_ROUNDING, SMALLEST_AMAX
from kernels.hadamard import SIGN_BIT, SIGN_FACTOR
from kernels.step.gpu.grid_barrier import (
    COUNTER_LINE,
    HEAD_READY,
    HEADS_DONE,
    arrive_published,
    clear,
    publish,
    received,
    wait_grid,
)
from kernels.step.gpu.ring import lines_of, lines_scales, release, rows_in, scales_of, wait_full
from kernels.step.gpu.step_constants import CONSUMER_WARPS, attended, head_element, key_range

_SCALE_ROUNDING = gl.constexpr(SCALE_ROUNDING)
_SCALE_EXPONENT = gl.constexpr(SCALE_EXPONENT)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)
_SIGN_FACTOR = gl.constexpr(SIGN_FACTOR)
_SIGN_BIT = gl.constexpr(SIGN_BIT)


@gluon.jit
def attend(
    ring, qkv, vectors, cache, seen, position, earlier, slot, parts, logs, parity, counter, arrivals, used, eps,
    scale, c,
):  # fmt: skip
    """Attend this program's splits for some of the query heads of one key-value head of its row.

    The first group of splits also writes the token's key and value. `qkv`, `seen`, `position` and `slot` are of the
    row, which follows `earlier` other tokens of its sequence in this step. `vectors` are as in `bring_heads`, `cache`
    is a result of `cache_of`; `seen` is the first key that the token may see; `scale` is in units of log2. Of several
    rows, splits without keys give results too. Returns `used` and the number of programs that give results.
    """
    row, kv_head, part, split_group = attended(c)
    splits, _, _ = key_range(seen, position, 0, c)
    programs = c.SPLIT_GROUPS
    if c.BATCH == 1:
        programs = splits
    if split_group < programs:
        wait_grid(counter + HEAD_READY + kv_head * COUNTER_LINE, arrivals, gl.constexpr(False))
        bring_heads(ring, qkv, vectors, kv_head, part, earlier, eps, c)
        dims: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, c.A))
        if split_group == 0 and part == 0:
            write_to_cache(ring, cache, earlier, slot, kv_head, c)
        queries = ()
        for g in gl.static_range(c.HELD):
            query = ring.heads.index(g).load(dims).to(gl.float32) * scale
            queries = queries + (query,)  # type: ignore[assignment]
        if c.BATCH == 1:
            log, merged, used = attend_split(
                ring, queries, seen, position, earlier, split_group, used, c
            )
            give(parts, logs, parity, split_group, log, merged, kv_head, part, c)
        else:
            for split in range(split_group * c.LOCAL, (split_group + 1) * c.LOCAL):
                number = split * c.BATCH + row
                if split < splits:
                    log, merged, used = attend_split(
                        ring, queries, seen, position, earlier, split, used, c
                    )
                    give(parts, logs, parity, number, log, merged, kv_head, part, c)
                else:
                    plane: gl.constexpr = gl.SliceLayout(1, c.M)
                    nothing = gl.zeros([c.HELD_P, c.DP], gl.float32, layout=plane)
                    log = gl.full(
                        [c.HELD_P], float("-inf"), gl.float32, layout=gl.SliceLayout(1, gl.SliceLayout(2, c.M))
                    )  # fmt: skip
                    give(parts, logs, parity, number, log, nothing, kv_head, part, c)
        arrive_published(counter + HEADS_DONE, c)
    elif c.EARLY and c.BATCH == 1 and split_group < c.SPLIT_GROUPS:
        # A longer sequence may have this split again.
        number = gl.arange(0, c.DP, layout=gl.BlockedLayout([1], [32], [CONSUMER_WARPS], [0]))
        for g in gl.static_range(c.HELD):
            head = (
                split_group * c.HEADS
                + kv_head * c.GROUP
                + gl.minimum(part * c.HELD + g, c.GROUP - 1)
            )
            place = head * c.D + gl.minimum(number, c.D - 1)
            clear(parts, c.SPLITS * c.HEADS * c.D, parity, place, gl.constexpr(True))
            clear(logs, c.SPLITS * c.HEADS, parity, head + number * 0, gl.constexpr(True))
    return used, programs * c.UNITS


@gluon.jit
def attend_split(ring, queries, seen, position, earlier, split, used, c):
    """Attend a split; returns log-sum-exps [HELD_P] in units of log2, results [HELD_P, DP], float32, and `used`."""
    line: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, c.A))
    _, first, last = key_range(seen, position, split, c)
    state = ()
    for _ in gl.static_range(c.HELD):
        m = gl.full([c.LINES], float("-inf"), gl.float32, layout=line)
        total = gl.zeros([c.LINES], gl.float32, layout=line)
        acc = gl.zeros([c.LINES, c.DP], gl.float32, layout=gl.SliceLayout(1, c.A))
        state = state + ((m, total, acc),)  # type: ignore[assignment]
    for i in range(first, last - 1, 2):
        state, used = attend_stages(
            ring, state, queries, i, seen, position, earlier, used, gl.constexpr(2), c
        )
    if (last - first) % 2 == 1:
        state, used = attend_stages(
            ring, state, queries, last - 1, seen, position, earlier, used, gl.constexpr(1), c
        )
    log, merged = merge_lines(ring, state, c)
    return log, merged, used


@gluon.constexpr_function
def head_layout(dim):
    """Return the register layout of heads [rows, 2, dim / 2]: a thread has both halves."""
    lanes = min(32, dim // 4)
    return gl.BlockedLayout([1, 2, 2], [32 // lanes, 1, lanes], [8, 1, 1], [2, 1, 0])


@gluon.jit
def load_head_vector(vector, c):
    """Load a vector over a head's elements, [1, 2, DP / 2] float32."""
    HALF: gl.constexpr = c.D // 2
    plane: gl.constexpr = gl.SliceLayout(0, head_layout(c.DP))
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, plane))[:, None]
    within = gl.arange(0, c.DP // 2, layout=gl.SliceLayout(0, plane))[None, :]
    numbers = gl.load(vector + half * HALF + within, mask=(within < HALF) & (half >= 0), other=0.0)
    return gl.expand_dims(numbers.to(gl.float32), 0)


@gluon.jit
def row_rotation(cos, sin, position, earlier, c):
    """Load the cosine and the sine of each row of the buffer of heads, [HEAD_ROWS, 2, DP / 2] float32."""
    HALF: gl.constexpr = c.D // 2
    layout: gl.constexpr = head_layout(c.DP)
    plane: gl.constexpr = gl.SliceLayout(0, layout)
    head = gl.arange(0, c.HEAD_ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, plane))[:, None]
    within = gl.arange(0, c.DP // 2, layout=gl.SliceLayout(0, plane))[None, :]
    row = position - earlier + row_of_head(head, earlier, c)
    place = gl.expand_dims(gl.expand_dims(row * c.D, 1), 2)
    place = place + gl.expand_dims(half * HALF + within, 0)
    exists = (gl.expand_dims(within + half * 0, 0) + place * 0) < HALF
    cosine = gl.load(cos + place, mask=exists, other=0.0).to(gl.float32)
    return cosine, gl.load(sin + place, mask=exists, other=0.0).to(gl.float32)


@gluon.jit
def row_of_head(head, earlier, c):
    """Return which of the step's tokens of the sequence a row of the buffer of heads is of; `earlier` is the last."""
    return gl.where(head < c.HELD, earlier, gl.minimum((head - c.HELD) % c.BATCH, earlier))


@gluon.jit
def bring_heads(ring, qkv, vectors, kv_head, part, earlier, eps, c):
    """Receive query heads of a part, keys and values, normalize and rotate them, and store them in shared memory.

    The keys and values are those of the row and of the `earlier` ones of its sequence. `vectors` are cosine, sine, and
    the gains of queries and keys.
    """
    PROJECTED: gl.constexpr = (c.HEADS + 2 * c.KV_HEADS) * c.D
    HALF: gl.constexpr = c.D // 2
    HALF_P: gl.constexpr = c.DP // 2
    VALUE: gl.constexpr = c.HELD + c.BATCH
    dtype: gl.constexpr = ring.heads.dtype
    layout: gl.constexpr = head_layout(c.DP)
    plane: gl.constexpr = gl.SliceLayout(0, layout)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    head = gl.arange(0, c.HEAD_ROWS, layout=rows)
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, plane))[:, None]
    within = gl.arange(0, HALF_P, layout=gl.SliceLayout(0, plane))[None, :]
    query = gl.minimum(part * c.HELD + head, c.GROUP - 1)
    line = gl.where(head < c.HELD, kv_head * c.GROUP + query, c.HEADS + kv_head)
    line = gl.where(head >= VALUE, c.HEADS + c.KV_HEADS + kv_head, line)
    start = line * c.D
    if c.BATCH > 1:
        start += (row_of_head(head, earlier, c) - earlier) * PROJECTED
    head = gl.expand_dims(gl.expand_dims(head, 1), 2)
    start = gl.expand_dims(gl.expand_dims(start, 1), 2)
    wide = gl.expand_dims(half * HALF + within, 0) + head * 0
    exists = (gl.expand_dims(within + half * 0, 0) + head * 0) < HALF
    cosine, sine, q_gain, k_gain = vectors
    gain = gl.where(head < c.HELD, q_gain, k_gain)
    place = qkv + (start + wide)
    raw = gl.load(place, mask=exists, other=0.0, cache_modifier=".cg")
    raw = received(raw, place, 2, c).to(gl.float32)
    x = raw
    if c.NORMS:
        squares = gl.sum(gl.sum(x * x, 2), 1)
        inverse = 1.0 / gl.sqrt(squares / c.D + eps)
        inverse = gl.expand_dims(gl.expand_dims(inverse, 1), 2)
        x = (x * inverse * gain).to(dtype).to(gl.float32)
    first, second = gl.split(gl.permute(x, [0, 2, 1]))
    other = gl.permute(gl.join(second, first), [0, 2, 1])
    other = gl.convert_layout(other, layout, assert_trivial=True)
    rotated = gl.fma(x, cosine, other * sine)
    if c.FP8:
        rotated = hadamard_transform(rotated.to(dtype).to(gl.float32), wide, c)
    rotated = gl.where(head >= VALUE, raw, rotated).to(dtype)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring.heads._reinterpret(dtype, [c.HEAD_ROWS, 2, HALF_P], shared).store(rotated)
    gl.thread_barrier()


@gluon.jit
def hadamard_transform(x, element, c):
    """Multiply heads by `kernels.hadamard.hadamard_matrix`; `x` and the elements' numbers are [rows, 2, DP / 2]."""
    HALF: gl.constexpr = c.D // 2
    POWER: gl.constexpr = HALF & -HALF
    layout: gl.constexpr = x.type.layout
    x *= 1.0 - 2.0 * ((element * _SIGN_FACTOR >> _SIGN_BIT) & 1).to(gl.float32)
    within = gl.arange(0, c.DP // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    within = gl.expand_dims(gl.expand_dims(within, 0), 1) + element * 0
    for i in gl.static_range(7):
        if 1 << i < POWER:
            other = gl.gather(x, within ^ (1 << i), 2)
            x = gl.where(((within >> i) & 1) == 1, other - x, other + x)
    first, second = gl.split(gl.permute(x, [0, 2, 1]))
    x = gl.permute(gl.join(first + second, first - second), [0, 2, 1])
    return gl.convert_layout(x, layout, assert_trivial=True) * (2 * POWER) ** -0.5


@gluon.jit
def scale_of(row, c):
    """Return the scale of a key or a value [DP] in the cache, and its inverse; both are 1 without FP8."""
    scale = 1.0
    inverse = 1.0
    if c.FP8:
        largest = gl.maximum(gl.max(gl.abs(row.to(gl.float32)), 0), _SMALLEST_AMAX)
        bits = (largest.to(gl.int32, bitcast=True) + _SCALE_ROUNDING) & 0x7F800000
        bits -= _SCALE_EXPONENT << 23
        scale = bits.to(gl.float32, bitcast=True)
        inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    return scale, inverse


@gluon.jit
def rounded(row, inverse, c):
    """Multiply a key or a value [DP] by the inverse of its scale and round it to the cache's dtype."""
    if c.FP8:
        row = (row.to(gl.float32) * inverse).to(gl.float8e4nv)
    return row


@gluon.jit
def write_to_cache(ring, cache, earlier, slot, kv_head, c):
    """Write the key and the value of the row's token to its slot of the cache, a result of `cache_of`."""
    dims: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, c.A))
    d, exists = head_element(gl.arange(0, c.DP, layout=dims), c)
    line = (slot.to(gl.int64) * c.KV_HEADS + kv_head) * c.D
    scale_line = (slot // c.BLOCK_SIZE).to(gl.int64) * c.KV_HEADS + kv_head
    for which in gl.static_range(2):
        numbers, scale = stored_row(ring, c.HELD + which * c.BATCH + earlier, c)
        target, scales = cache[which]
        gl.store(target + line + d, numbers, mask=exists & (slot >= 0))
        if c.FP8:
            place = scales + scale_line * c.BLOCK_SIZE + slot % c.BLOCK_SIZE
            gl.store(place, scale, mask=slot >= 0)


@gluon.jit
def stored_row(ring, head, c):
    """Return a row of the buffer of heads [DP] as the cache stores it, and its scale."""
    dims: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, c.A))
    row = ring.heads.index(head).load(dims)
    scale, inverse = scale_of(row, c)
    return rounded(row, inverse, c), scale


@gluon.jit
def add_step_keys(ring, number, position, earlier, used, COUNT: gl.constexpr, c):
    """Write the step's keys and values to their places in COUNT stages that have arrived, from stage `number` on."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [CONSUMER_WARPS], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    begin = number * c.KEYS
    first = position - earlier
    low = gl.maximum(begin, first)
    high = gl.minimum(begin + COUNT * c.KEYS - 1, position)
    for key in range(low, high + 1):
        stage = (used + (key - begin) // c.KEYS) % c.STAGES
        place = (key - begin) % c.KEYS
        both = rows_in(ring, stage, c)
        for which in gl.static_range(2):
            numbers, scale = stored_row(ring, c.HELD + which * c.BATCH + key - first, c)
            both.index(which * c.KEYS + place).store(numbers)
            if c.FP8:
                scales = scales_of(ring, stage, which, c)._reinterpret(
                    gl.float32, [c.KEYS, 1], flat
                )
                scales.index(place).store(gl.full([1], 0.0, gl.float32, layout=one) + scale)
    gl.thread_barrier()


@gluon.jit
def attend_stages(
    ring, state, queries, number, seen, position, earlier, used, COUNT: gl.constexpr, c
):  # fmt: skip
    """Attend COUNT stages of keys, from stage `number` of the sequence on."""
    at: gl.constexpr = gl.SliceLayout(2, c.A)
    row = gl.arange(0, c.LINES, layout=gl.SliceLayout(1, at))[:, None] * 2
    row = row + gl.arange(0, 2, layout=gl.SliceLayout(0, at))[None, :]
    for i in gl.static_range(COUNT):
        wait_full(ring, used + i, c)
    if (number + COUNT) * c.KEYS > position - earlier:
        add_step_keys(ring, number, position, earlier, used, COUNT, c)
    all_scores = ()
    highest = ()
    for g in gl.static_range(c.HELD):
        highest = highest + (state[g][0],)  # type: ignore[assignment]
    for i in gl.static_range(COUNT):
        stage = (used + i) % c.STAGES
        keys = lines_of(ring, stage, c).index(0).load(c.A).to(gl.float32)
        scales = lines_scales(ring, stage, gl.constexpr(False), at, c)
        exists = (number + i) * c.KEYS + row <= position
        if c.WINDOWS:
            exists &= (number + i) * c.KEYS + row >= seen
        scores = ()
        raised = ()
        for g in gl.static_range(c.HELD):
            query = gl.expand_dims(gl.expand_dims(queries[g], 0), 0)
            score = gl.where(exists, gl.sum(keys * query, 2) * scales, float("-inf"))
            scores = scores + (score,)  # type: ignore[assignment]
            raised = raised + (gl.maximum(highest[g], gl.max(score, 1)),)  # type: ignore[assignment]
        highest = raised
        all_scores = all_scores + (scores,)  # type: ignore[assignment]
    after = ()
    for g in gl.static_range(c.HELD):
        m, total, acc = state[g]
        base = gl.where(highest[g] == float("-inf"), 0.0, highest[g])
        fade = gl.exp2(m - base)
        after = after + ((highest[g], total * fade, acc * rows_of(fade, acc)[:, None]),)  # type: ignore[assignment]
    for i in gl.static_range(COUNT):
        stage = (used + i) % c.STAGES
        values = lines_of(ring, stage, c).index(1).load(c.A).to(gl.float32)
        scales = lines_scales(ring, stage, gl.constexpr(True), at, c)
        added = ()
        for g in gl.static_range(c.HELD):
            m, total, acc = after[g]
            base = gl.where(m == float("-inf"), 0.0, m)
            p = gl.exp2(all_scores[i][g] - base[:, None])
            weighted = gl.sum(gl.expand_dims(p * scales, 2) * values, 1)
            added = added + ((m, total + gl.sum(p, 1), acc + weighted),)  # type: ignore[assignment]
        after = added
    release(ring, used, COUNT, c)
    return after, used + COUNT


@gluon.jit
def rows_of(values, like):
    """Convert numbers, one for each row of `like`, to the layout of its rows."""
    return gl.convert_layout(values, gl.SliceLayout(1, like.type.layout))


@gluon.jit
def merge_lines(ring, state, c):
    """Merge the results of the lines; returns log-sum-exps [HELD_P] in units of log2, and results [HELD_P, DP]."""
    plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    space: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    HEADS: gl.constexpr = c.INPUTS // (2 * c.LINES * c.DP)
    stored = ring.x._reinterpret(gl.float32, [HEADS, c.LINES, c.DP], plane)
    maxima = ring.maxima._reinterpret(gl.float32, [c.HELD_P, c.LINES], flat)
    totals = ring.totals._reinterpret(gl.float32, [c.HELD_P, c.LINES], flat)
    if c.BATCH > 1:
        # All have read those of the split before.
        gl.thread_barrier()
    for g in gl.static_range(c.HELD):
        m, total, acc = state[g]
        stored.index(g).store(acc)
        maxima.index(g).store(m)
        totals.index(g).store(total)
    gl.thread_barrier()
    lines: gl.constexpr = gl.SliceLayout(2, c.M)
    shape: gl.constexpr = [HEADS // c.HELD_P, c.HELD_P, c.LINES, c.DP]
    acc = ring.x._reinterpret(gl.float32, shape, space).index(0).load(c.M)
    m = ring.maxima.load(lines)
    total = ring.totals.load(lines)
    highest = gl.max(m, 1)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    weight = gl.exp2(m - base[:, None])
    whole = gl.sum(total * weight, 1)
    inverse = gl.where(whole == 0.0, 0.0, 1.0 / gl.where(whole == 0.0, 1.0, whole))
    log = gl.where(whole == 0.0, float("-inf"), base + gl.log2(gl.where(whole == 0.0, 1.0, whole)))
    merged = gl.sum(acc * gl.expand_dims(weight, 2), 1)
    merged *= gl.convert_layout(
        inverse, gl.SliceLayout(1, merged.type.layout), assert_trivial=True
    )[:, None]
    return log, merged


@gluon.jit
def give(parts, logs, parity, number, log, merged, kv_head, part, c):
    """Publish the results of the heads that this program has attended, and their log-sum-exps.

    `number` is that of the split times the number of rows, plus the row's.
    """
    heads: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, c.M))
    g = gl.arange(0, c.HELD_P, layout=heads)
    query = part * c.HELD + g
    exists = (g < c.HELD) & (query < c.GROUP)
    head = number * c.HEADS + kv_head * c.GROUP + query
    ALL: gl.constexpr = c.SPLITS * c.BATCH * c.HEADS
    publish(logs, ALL, parity, head, log, exists, c)
    rows: gl.constexpr = gl.SliceLayout(1, merged.type.layout)
    head = gl.convert_layout(head, rows, assert_trivial=True)[:, None]
    exists = gl.convert_layout(exists, rows, assert_trivial=True)[:, None]
    d, in_head = head_element(gl.arange(0, c.DP, layout=gl.SliceLayout(0, merged.type.layout)), c)
    place = head * c.D + d[None, :]
    publish(parts, ALL * c.D, parity, place, merged, exists & in_head[None, :], c)
