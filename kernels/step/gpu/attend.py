"""Attention in the whole-step kernel: one query token, its keys split over the programs, and the merge of the splits.

Each warp attends one eighth of a stage's keys and keeps its own maximum, so that warps exchange nothing before a split
is done. All programs then merge the splits of all heads, which are a few KB.

Source: Dao et al., "Flash-Decoding", 2023.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.fp8 import LARGEST_E4M3, SMALLEST_AMAX
from kernels.step.gpu.grid_barrier import (
    COUNTER_LINE,
    HEAD_READY,
    HEADS_DONE,
    arrive_grid,
    fence,
    received,
    wait_grid,
)
from kernels.step.gpu.ring import (
    COLUMNS,
    CONSUMER_WARPS,
    MOST_SPLITS,
    key_range,
    release,
    wait_full,
    warps_keys_of,
    warps_scales,
)

_LARGEST = gl.constexpr(LARGEST_E4M3)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)


@gluon.jit
def attend(
    ring, qkv, vectors, cache, position, slot, parts, logs, counter, arrivals, used, eps, scale, c
):  # fmt: skip
    """Attend this program's split for the heads of one key-value head.

    The first split also writes the token's key and value. `cache` is a result of `cache_of`; `scale` is in units of
    log2. Returns `used` and the number of programs that attend.
    """
    kv_head = gl.program_id(0) % c.KV_HEADS
    split = gl.program_id(0) // c.KV_HEADS
    splits, first, last = key_range(position, split, c)
    if split < splits:
        wait_grid(counter + HEAD_READY + kv_head * COUNTER_LINE, arrivals)
        bring_heads(ring, qkv, vectors, kv_head, eps, c)
        dims: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, c.A))
        warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, c.A))
        queries = ()
        state = ()
        for g in gl.static_range(c.GROUP):
            query = ring.heads.index(g).load(dims).to(gl.float32) * scale
            queries = queries + (query,)  # type: ignore[assignment]
            m = gl.full([8], float("-inf"), gl.float32, layout=warp)
            total = gl.zeros([8], gl.float32, layout=warp)
            acc = gl.zeros([8, c.D], gl.float32, layout=gl.SliceLayout(1, c.A))
            state = state + ((m, total, acc),)  # type: ignore[assignment]
        if split == 0:
            key = ring.heads.index(c.GROUP).load(dims)
            value = ring.heads.index(c.GROUP + 1).load(dims)
            key_scale, key_inverse = scale_of(key, c)
            value_scale, value_inverse = scale_of(value, c)
            key = rounded(key, key_scale, key_inverse, c)
            value = rounded(value, value_scale, value_inverse, c)
            write_own(cache[0], key, key_scale, slot, kv_head, c)
            write_own(cache[1], value, value_scale, slot, kv_head, c)
            row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, c.A))
            value = ring.heads.index(c.GROUP + 1).load(row)
            value = rounded(value, value_scale, value_inverse, c).to(gl.float32) * value_scale
            state = own_key(state, queries, key.to(gl.float32) * key_scale, value, c)
        for i in range(first, last - 1, 2):
            state, used = attend_stages(ring, state, queries, i, position, used, gl.constexpr(2), c)
        if (last - first) % 2 == 1:
            state, used = attend_stages(
                ring, state, queries, last - 1, position, used, gl.constexpr(1), c
            )
        merge_warps(ring, state, parts, logs, split, kv_head, c)
        arrive_grid(counter + HEADS_DONE)
    elif c.EARLY:
        fence()
    return used, splits * c.KV_HEADS


@gluon.constexpr_function
def head_layout(dim):
    """Return the register layout of heads [rows, 2, dim / 2]: a warp has one or two heads, a thread both halves."""
    if dim == 128:
        return gl.BlockedLayout([1, 2, 2], [1, 1, 32], [8, 1, 1], [2, 1, 0])
    return gl.BlockedLayout([1, 2, 2], [64 // (dim // 2), 1, dim // 4], [8, 1, 1], [2, 1, 0])


@gluon.jit
def load_head_vector(vector, c):
    """Load a vector over a head's elements, [1, 2, D / 2] float32."""
    plane: gl.constexpr = gl.SliceLayout(0, head_layout(c.D))
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, plane))[:, None]
    d = half * (c.D // 2) + gl.arange(0, c.D // 2, layout=gl.SliceLayout(0, plane))[None, :]
    return gl.expand_dims(gl.load(vector + d).to(gl.float32), 0)


@gluon.jit
def bring_heads(ring, qkv, vectors, kv_head, eps, c):
    """Receive queries, key and value of a key-value head, normalize and rotate them, and store them in shared memory.

    `vectors` are cosine, sine, and the gains of queries and keys.
    """
    HALF: gl.constexpr = c.D // 2
    dtype: gl.constexpr = ring.heads.dtype
    layout: gl.constexpr = head_layout(c.D)
    plane: gl.constexpr = gl.SliceLayout(0, layout)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    head = gl.arange(0, c.HEAD_ROWS, layout=rows)
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, plane))[:, None]
    d = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, plane))[None, :]
    line = gl.where(head < c.GROUP, kv_head * c.GROUP + head, c.HEADS + kv_head)
    line = gl.where(head > c.GROUP, c.HEADS + c.KV_HEADS + kv_head, line)
    head = gl.expand_dims(gl.expand_dims(head, 1), 2)
    line = gl.expand_dims(gl.expand_dims(line, 1), 2)
    wide = gl.expand_dims(d, 0) + head * 0
    cosine, sine, q_gain, k_gain = vectors
    gain = gl.where(head < c.GROUP, q_gain, k_gain)
    place = qkv + (line * c.D + wide)
    raw = received(gl.load(place, cache_modifier=".cg"), place, 2, c).to(gl.float32)
    x = raw
    if c.NORMS:
        squares = gl.sum(gl.sum(x * x, 2), 1)
        inverse = 1.0 / gl.sqrt(squares / c.D + eps)
        inverse = gl.expand_dims(gl.expand_dims(inverse, 1), 2)
        x = (x * inverse * gain).to(dtype).to(gl.float32)
    first, second = gl.split(gl.permute(x, [0, 2, 1]))
    other = gl.permute(gl.join(second, first), [0, 2, 1])
    other = gl.convert_layout(other, layout, assert_trivial=True)
    rotated = x * cosine + other * sine
    rotated = gl.where(head > c.GROUP, raw, rotated).to(dtype)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    gl.thread_barrier()
    ring.heads._reinterpret(dtype, [c.HEAD_ROWS, 2, HALF], shared).store(rotated)
    gl.thread_barrier()


@gluon.jit
def scale_of(row, c):
    """Return the scale of a key or a value [D] in the cache, and its inverse; both are 1 without FP8."""
    scale = 1.0
    inverse = 1.0
    if c.FP8:
        largest = gl.max(gl.abs(row.to(gl.float32)), 0)
        scale = gl.where(largest >= _SMALLEST_AMAX, gl.div_rn(largest, _LARGEST), 1.0)
        inverse = gl.div_rn(1.0, scale)
    return scale, inverse


@gluon.jit
def rounded(row, scale, inverse, c):
    """Divide a key or a value [D] by its scale and round it to the cache's dtype.

    The bits are those of `portable_write_kv`: with the inverse rounded to nearest, one correction makes the quotient
    exact to its last bit (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990). The
    library's exact division contains branches, which took 0.6 us of a layer's 18 us.
    """
    if c.FP8:
        wide = row.to(gl.float32)
        quotient = wide * inverse
        row = gl.fma(gl.fma(quotient, -scale, wide), inverse, quotient).to(gl.float8e4nv)
    return row


@gluon.jit
def write_own(target, numbers, scale, slot, kv_head, c):
    """Write a key or a value to its slot; `target` holds the addresses of the numbers and of the scales."""
    d = gl.arange(0, c.D, layout=numbers.type.layout)
    line = (slot.to(gl.int64) * c.KV_HEADS + kv_head) * c.D
    gl.store(target[0] + line + d, numbers, mask=(d >= 0) & (slot >= 0))
    if c.FP8:
        line = (slot // c.BLOCK_SIZE).to(gl.int64) * c.KV_HEADS + kv_head
        gl.store(target[1] + line * c.BLOCK_SIZE + slot % c.BLOCK_SIZE, scale, mask=slot >= 0)


@gluon.jit
def own_key(state, queries, key, value, c):
    """Start the running softmax with the token's own key, in the first warp; `value` [D] has the layout of `acc`."""
    after = ()
    for g in gl.static_range(c.GROUP):
        m, total, acc = state[g]
        score = gl.sum(queries[g] * key, 0)
        is_first = gl.arange(0, 8, layout=m.type.layout) == 0
        m = gl.where(is_first, score, m)
        total = gl.where(is_first, 1.0, total)
        first_row = gl.arange(0, 8, layout=gl.SliceLayout(1, acc.type.layout)) == 0
        acc = gl.where(first_row[:, None], value[None, :] + acc, acc)
        after = after + ((m, total, acc),)  # type: ignore[assignment]
    return after


@gluon.jit
def attend_stages(ring, state, queries, number, position, used, COUNT: gl.constexpr, c):
    """Attend COUNT stages of keys, from stage `number` of the sequence on."""
    at: gl.constexpr = gl.SliceLayout(2, c.A)
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, at))[:, None] * (c.KEYS // 8)
    row = row + gl.arange(0, c.KEYS // 8, layout=gl.SliceLayout(0, at))[None, :]
    for i in gl.static_range(COUNT):
        wait_full(ring, used + i, c)
    all_scores = ()
    highest = ()
    for g in gl.static_range(c.GROUP):
        highest = highest + (state[g][0],)  # type: ignore[assignment]
    for i in gl.static_range(COUNT):
        stage = (used + i) % c.STAGES
        keys = warps_keys_of(ring, stage, c).index(0).load(c.A).to(gl.float32)
        scales = warps_scales(ring, stage, gl.constexpr(False), at, c)
        exists = (number + i) * c.KEYS + row < position
        scores = ()
        raised = ()
        for g in gl.static_range(c.GROUP):
            query = gl.expand_dims(gl.expand_dims(queries[g], 0), 0)
            score = gl.where(exists, gl.sum(keys * query, 2) * scales, float("-inf"))
            scores = scores + (score,)  # type: ignore[assignment]
            raised = raised + (gl.maximum(highest[g], gl.max(score, 1)),)  # type: ignore[assignment]
        highest = raised
        all_scores = all_scores + (scores,)  # type: ignore[assignment]
    after = ()
    for g in gl.static_range(c.GROUP):
        m, total, acc = state[g]
        base = gl.where(highest[g] == float("-inf"), 0.0, highest[g])
        fade = gl.exp2(m - base)
        after = after + ((highest[g], total * fade, acc * rows_of(fade, acc)[:, None]),)  # type: ignore[assignment]
    for i in gl.static_range(COUNT):
        stage = (used + i) % c.STAGES
        values = warps_keys_of(ring, stage, c).index(1).load(c.A).to(gl.float32)
        scales = warps_scales(ring, stage, gl.constexpr(True), at, c)
        added = ()
        for g in gl.static_range(c.GROUP):
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
def merge_warps(ring, state, parts, logs, split, kv_head, c):
    """Merge the results of the warps; write the split's result and its log-sum-exp in units of log2."""
    for g in gl.static_range(c.GROUP):
        m, total, acc = state[g]
        ring.accs.index(g).store(acc)
        ring.sums.index(2 * g).store(m)
        ring.sums.index(2 * g + 1).store(total)
    gl.thread_barrier()
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [1, 32], [1, CONSUMER_WARPS], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    d = gl.arange(0, c.D, layout=columns)
    for g in gl.static_range(c.GROUP):
        acc = ring.accs.index(g).load(layout)
        m = ring.sums.index(2 * g).load(rows)
        total = ring.sums.index(2 * g + 1).load(rows)
        highest = gl.max(m, 0)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        weight = gl.exp2(m - base)
        whole = gl.sum(total * weight, 0)
        merged = gl.sum(acc * weight[:, None], 0)
        merged = merged * gl.where(whole == 0.0, 0.0, 1.0 / gl.where(whole == 0.0, 1.0, whole))
        head = kv_head * c.GROUP + g
        log = gl.where(
            whole == 0.0, float("-inf"), base + gl.log2(gl.where(whole == 0.0, 1.0, whole))
        )
        line = split * c.HEADS + head
        gl.store(parts + line * c.D + d, merged.to(parts.dtype.element_ty))
        gl.store(logs + line, log)


@gluon.constexpr_function
def merge_layout(dim):
    """Return the register layout of parts [splits, heads, dim]: a thread holds all splits, so their sum is local."""
    lanes = dim // 4
    return gl.BlockedLayout(
        [MOST_SPLITS.value, 1, 4], [1, 32 // lanes, lanes], [1, 8, 1], [2, 1, 0]
    )


@gluon.jit
def combine(ring, parts, logs, position, c):
    """Load the splits of all heads at once, merge them and store the result in shared memory."""
    HEADS: gl.constexpr = min(c.HEADS, 2048 // c.D)
    layout: gl.constexpr = merge_layout(c.D)
    lines: gl.constexpr = gl.SliceLayout(2, layout)
    splits, _, _ = key_range(position, 0, c)
    target = ring.x._reinterpret(
        ring.x.dtype,
        [ring.x.shape[0] * COLUMNS // (HEADS * c.D), HEADS, c.D],
        gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    )
    # Each warp loads the log-sum-exps of one split: all programs read the same few cache lines at once.
    few: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [CONSUMER_WARPS, 1], [1, 0])
    of_few = gl.arange(0, MOST_SPLITS, layout=gl.SliceLayout(1, few))[:, None]
    head_of_few = gl.arange(0, HEADS, layout=gl.SliceLayout(0, few))[None, :]
    split = gl.arange(0, MOST_SPLITS, layout=gl.SliceLayout(1, lines))[:, None]
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(0, lines))[None, :]
    d = gl.arange(0, c.D, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    exists = (split < splits) & (head >= 0)
    for i in gl.static_range(c.HEADS // HEADS):
        place = logs + of_few * c.HEADS + (i * HEADS + head_of_few)
        log = gl.load(place, mask=of_few < splits, other=float("-inf"), cache_modifier=".cg")
        line = split * c.HEADS + (i * HEADS + head)
        place = parts + gl.expand_dims(line, 2) * c.D + d
        part = gl.load(place, mask=gl.expand_dims(exists, 2), other=0.0, cache_modifier=".cg")
        log = gl.convert_layout(log, lines)
        weight = gl.exp2(log - gl.max(log, 0)[None, :])
        acc = gl.sum(part.to(gl.float32) * gl.expand_dims(weight, 2), 0)
        mixed = acc * rows_of(1.0 / gl.sum(weight, 0), acc)[:, None]
        target.index(i).store(mixed.to(ring.x.dtype))
    gl.thread_barrier()
