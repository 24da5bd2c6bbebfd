"""Attention in the whole-step kernel: one query token, its keys split over the programs, and the merge of the splits.

A line of lanes attends two keys of each stage and keeps its own maximum, so that lines exchange nothing before a split
is done. All programs then merge the splits of all heads, which are a few KB.

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
    received_log,
    wait_grid,
)
from kernels.step.gpu.ring import (
    COLUMNS,
    CONSUMER_WARPS,
    MERGED,
    MOST_SPLITS,
    attended,
    head_element,
    key_range,
    lines_of,
    lines_scales,
    release,
    wait_full,
)
from kernels.step.gpu.tensor_products import store_vector

_SCALE_ROUNDING = gl.constexpr(SCALE_ROUNDING)
_SCALE_EXPONENT = gl.constexpr(SCALE_EXPONENT)
_SMALLEST_AMAX = gl.constexpr(SMALLEST_AMAX)
_SIGN_FACTOR = gl.constexpr(SIGN_FACTOR)
_SIGN_BIT = gl.constexpr(SIGN_BIT)


@gluon.jit
def attend(
    ring, qkv, vectors, cache, seen, position, slot, parts, logs, parity, counter, arrivals, used, eps, scale, c
):  # fmt: skip
    """Attend this program's split for some of the query heads of one key-value head of its sequence.

    The first split also writes the token's key and value. `qkv`, `vectors`, `seen`, `position` and `slot` are of the
    sequence. `cache` is a result of `cache_of`; `seen` is the first key that the token may see; `scale` is in units of
    log2. With several sequences, splits without keys give results too. Returns `used` and the number of programs that
    give results.
    """
    sequence, kv_head, part, split = attended(c)
    splits, first, last = key_range(seen, position, split, c)
    if c.BATCH > 1:
        splits = c.SPLITS
    if split < splits:
        wait_grid(counter + HEAD_READY + kv_head * COUNTER_LINE, arrivals, gl.constexpr(False))
        bring_heads(ring, qkv, vectors, kv_head, part, eps, c)
        dims: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, c.A))
        line: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, c.A))
        queries = ()
        state = ()
        for g in gl.static_range(c.HELD):
            query = ring.heads.index(g).load(dims).to(gl.float32) * scale
            queries = queries + (query,)  # type: ignore[assignment]
            m = gl.full([c.LINES], float("-inf"), gl.float32, layout=line)
            total = gl.zeros([c.LINES], gl.float32, layout=line)
            acc = gl.zeros([c.LINES, c.DP], gl.float32, layout=gl.SliceLayout(1, c.A))
            state = state + ((m, total, acc),)  # type: ignore[assignment]
        if split == 0:
            key = ring.heads.index(c.HELD).load(dims)
            value = ring.heads.index(c.HELD + 1).load(dims)
            key_scale, key_inverse = scale_of(key, c)
            value_scale, value_inverse = scale_of(value, c)
            key = rounded(key, key_inverse, c)
            value = rounded(value, value_inverse, c)
            if part == 0:
                write_own(cache[0], key, key_scale, slot, kv_head, c)
                write_own(cache[1], value, value_scale, slot, kv_head, c)
            row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, c.A))
            value = ring.heads.index(c.HELD + 1).load(row)
            value = rounded(value, value_inverse, c).to(gl.float32) * value_scale
            state = own_key(state, queries, key.to(gl.float32) * key_scale, value, c)
        for i in range(first, last - 1, 2):
            state, used = attend_stages(
                ring, state, queries, i, seen, position, used, gl.constexpr(2), c
            )
        if (last - first) % 2 == 1:
            state, used = attend_stages(
                ring, state, queries, last - 1, seen, position, used, gl.constexpr(1), c
            )
        split_row = split * c.BATCH + sequence
        merge_lines(ring, state, parts, logs, parity, split_row, kv_head, part, c)
        arrive_published(counter + HEADS_DONE, c)
    elif c.EARLY and c.BATCH == 1 and split < c.SPLITS:
        # A longer sequence may have this split again.
        number = gl.arange(0, c.DP, layout=gl.BlockedLayout([1], [32], [CONSUMER_WARPS], [0]))
        for g in gl.static_range(c.HELD):
            head = split * c.HEADS + kv_head * c.GROUP + gl.minimum(part * c.HELD + g, c.GROUP - 1)
            place = head * c.D + gl.minimum(number, c.D - 1)
            clear(parts, c.SPLITS * c.HEADS * c.D, parity, place, gl.constexpr(True))
            clear(logs, c.SPLITS * c.HEADS, parity, head + number * 0, gl.constexpr(True))
    return used, splits * c.UNITS


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
def bring_heads(ring, qkv, vectors, kv_head, part, eps, c):
    """Receive query heads of a part, key and value, normalize and rotate them, and store them in shared memory.

    `vectors` are cosine, sine, and the gains of queries and keys.
    """
    HALF: gl.constexpr = c.D // 2
    HALF_P: gl.constexpr = c.DP // 2
    dtype: gl.constexpr = ring.heads.dtype
    layout: gl.constexpr = head_layout(c.DP)
    plane: gl.constexpr = gl.SliceLayout(0, layout)
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    head = gl.arange(0, c.HEAD_ROWS, layout=rows)
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, plane))[:, None]
    within = gl.arange(0, HALF_P, layout=gl.SliceLayout(0, plane))[None, :]
    query = gl.minimum(part * c.HELD + head, c.GROUP - 1)
    line = gl.where(head < c.HELD, kv_head * c.GROUP + query, c.HEADS + kv_head)
    line = gl.where(head > c.HELD, c.HEADS + c.KV_HEADS + kv_head, line)
    head = gl.expand_dims(gl.expand_dims(head, 1), 2)
    line = gl.expand_dims(gl.expand_dims(line, 1), 2)
    wide = gl.expand_dims(half * HALF + within, 0) + head * 0
    exists = (gl.expand_dims(within + half * 0, 0) + head * 0) < HALF
    cosine, sine, q_gain, k_gain = vectors
    gain = gl.where(head < c.HELD, q_gain, k_gain)
    place = qkv + (line * c.D + wide)
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
    rotated = x * cosine + other * sine
    if c.FP8:
        rotated = hadamard_transform(rotated.to(dtype).to(gl.float32), wide, c)
    rotated = gl.where(head > c.HELD, raw, rotated).to(dtype)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring.heads._reinterpret(dtype, [c.HEAD_ROWS, 2, HALF_P], shared).store(rotated)
    gl.thread_barrier()


@gluon.jit
def hadamard_transform(x, element, c):
    """Multiply heads by `kernels.hadamard.hadamard_matrix`; `x` and the elements' numbers are [rows, 2, DP / 2]."""
    HALF: gl.constexpr = c.D // 2
    MIXED: gl.constexpr = HALF & -HALF
    layout: gl.constexpr = x.type.layout
    x *= 1.0 - 2.0 * ((element * _SIGN_FACTOR >> _SIGN_BIT) & 1).to(gl.float32)
    within = gl.arange(0, c.DP // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    within = gl.expand_dims(gl.expand_dims(within, 0), 1) + element * 0
    for i in gl.static_range(7):
        if 1 << i < MIXED:
            other = gl.gather(x, within ^ (1 << i), 2)
            x = gl.where(((within >> i) & 1) == 1, other - x, other + x)
    first, second = gl.split(gl.permute(x, [0, 2, 1]))
    x = gl.permute(gl.join(first + second, first - second), [0, 2, 1])
    return gl.convert_layout(x, layout, assert_trivial=True) * (2 * MIXED) ** -0.5


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
def write_own(target, numbers, scale, slot, kv_head, c):
    """Write a key or a value to its slot; `target` holds the addresses of the numbers and of the scales."""
    d, exists = head_element(gl.arange(0, c.DP, layout=numbers.type.layout), c)
    line = (slot.to(gl.int64) * c.KV_HEADS + kv_head) * c.D
    gl.store(target[0] + line + d, numbers, mask=exists & (slot >= 0))
    if c.FP8:
        line = (slot // c.BLOCK_SIZE).to(gl.int64) * c.KV_HEADS + kv_head
        gl.store(target[1] + line * c.BLOCK_SIZE + slot % c.BLOCK_SIZE, scale, mask=slot >= 0)


@gluon.jit
def own_key(state, queries, key, value, c):
    """Start the running softmax with the token's own key, in the first line; `value` [DP] has the layout of `acc`."""
    after = ()
    for g in gl.static_range(c.HELD):
        m, total, acc = state[g]
        score = gl.sum(queries[g] * key, 0)
        is_first = gl.arange(0, c.LINES, layout=m.type.layout) == 0
        m = gl.where(is_first, score, m)
        total = gl.where(is_first, 1.0, total)
        first_row = gl.arange(0, c.LINES, layout=gl.SliceLayout(1, acc.type.layout)) == 0
        acc = gl.where(first_row[:, None], value[None, :] + acc, acc)
        after = after + ((m, total, acc),)  # type: ignore[assignment]
    return after


@gluon.jit
def attend_stages(
    ring, state, queries, number, seen, position, used, COUNT: gl.constexpr, c
):  # fmt: skip
    """Attend COUNT stages of keys, from stage `number` of the sequence on."""
    at: gl.constexpr = gl.SliceLayout(2, c.A)
    row = gl.arange(0, c.LINES, layout=gl.SliceLayout(1, at))[:, None] * 2
    row = row + gl.arange(0, 2, layout=gl.SliceLayout(0, at))[None, :]
    for i in gl.static_range(COUNT):
        wait_full(ring, used + i, c)
    all_scores = ()
    highest = ()
    for g in gl.static_range(c.HELD):
        highest = highest + (state[g][0],)  # type: ignore[assignment]
    for i in gl.static_range(COUNT):
        stage = (used + i) % c.STAGES
        keys = lines_of(ring, stage, c).index(0).load(c.A).to(gl.float32)
        scales = lines_scales(ring, stage, gl.constexpr(False), at, c)
        exists = (number + i) * c.KEYS + row < position
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
def merge_lines(ring, state, parts, logs, parity, split_row, kv_head, part, c):
    """Merge the results of the lines; publish the split's result and its log-sum-exp in units of log2.

    `split_row` is the split's number times the number of sequences, plus the sequence's number.
    """
    plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    space: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    HEADS: gl.constexpr = c.INPUTS // (2 * c.LINES * c.DP)
    stored = ring.x._reinterpret(gl.float32, [HEADS, c.LINES, c.DP], plane)
    maxima = ring.maxima._reinterpret(gl.float32, [c.HELD_P, c.LINES], flat)
    totals = ring.totals._reinterpret(gl.float32, [c.HELD_P, c.LINES], flat)
    for g in gl.static_range(c.HELD):
        m, total, acc = state[g]
        stored.index(g).store(acc)
        maxima.index(g).store(m)
        totals.index(g).store(total)
    gl.thread_barrier()
    lines: gl.constexpr = gl.SliceLayout(2, c.M)
    heads: gl.constexpr = gl.SliceLayout(1, lines)
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
    g = gl.arange(0, c.HELD_P, layout=heads)
    query = part * c.HELD + g
    exists = (g < c.HELD) & (query < c.GROUP)
    head = split_row * c.HEADS + kv_head * c.GROUP + query
    ALL: gl.constexpr = c.SPLITS * c.BATCH * c.HEADS
    publish(logs, ALL, parity, head, log, exists, c)
    rows: gl.constexpr = gl.SliceLayout(1, merged.type.layout)
    head = gl.convert_layout(head, rows, assert_trivial=True)[:, None]
    exists = gl.convert_layout(exists, rows, assert_trivial=True)[:, None]
    d, in_head = head_element(gl.arange(0, c.DP, layout=gl.SliceLayout(0, merged.type.layout)), c)
    place = head * c.D + d[None, :]
    publish(parts, ALL * c.D, parity, place, merged, exists & in_head[None, :], c)


@gluon.constexpr_function
def merge_layout(size):
    """Return the register layout of parts [splits, blocks, size]: a thread holds all splits, so their sum is local."""
    lanes = min(32, size // 4)
    return gl.BlockedLayout(
        [MOST_SPLITS.value, 1, 4], [1, 32 // lanes, lanes], [1, 8, 1], [2, 1, 0]
    )


@gluon.constexpr_function
def merged_blocks(heads, dim, block):
    """Return how many blocks of a head are merged at once: a power of two, and at least a part of a product's columns.

    Zeros behind the heads fill the part, since what else is there may be NaN.
    """
    size = max(COLUMNS.value, 1 << (heads * dim - 1).bit_length())
    return min(MERGED.value, size) // block


@gluon.jit
def combine(ring, parts, logs, parity, seen, position, c):
    """Load the splits of all heads, merge them and store the result in shared memory.

    A head is D / BLOCK_D blocks, so that all sizes are powers of two.
    """
    PER_HEAD: gl.constexpr = c.D // c.BLOCK_D
    ALL: gl.constexpr = c.HEADS * PER_HEAD
    BLOCKS: gl.constexpr = merged_blocks(c.HEADS, c.D, c.BLOCK_D)
    layout: gl.constexpr = merge_layout(c.BLOCK_D)
    lines: gl.constexpr = gl.SliceLayout(2, layout)
    splits, _, _ = key_range(seen, position, 0, c)
    target = ring.x._reinterpret(
        ring.x.dtype,
        [c.INPUTS // (BLOCKS * c.BLOCK_D), BLOCKS, c.BLOCK_D],
        gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    )
    # Each warp loads the log-sum-exps of one split: all programs read the same few cache lines at once.
    few: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [CONSUMER_WARPS, 1], [1, 0])
    of_few = gl.arange(0, MOST_SPLITS, layout=gl.SliceLayout(1, few))[:, None]
    block_of_few = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, few))[None, :]
    split = gl.arange(0, MOST_SPLITS, layout=gl.SliceLayout(1, lines))[:, None]
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, lines))[None, :]
    d = gl.arange(0, c.BLOCK_D, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    for i in gl.static_range((ALL + BLOCKS - 1) // BLOCKS):
        # Blocks behind the last one have its log-sum-exps, but no numbers: they become zeros.
        number = i * BLOCKS + block_of_few
        place = (
            logs
            + parity * (c.SPLITS * c.HEADS)
            + of_few * c.HEADS
            + gl.minimum(number, ALL - 1) // PER_HEAD
        )
        log = gl.load(place, mask=of_few < splits, other=float("-inf"), cache_modifier=".cg")
        log = received_log(log, place, c)
        number = i * BLOCKS + block
        exists = (split < splits) & (number < ALL)
        place = parts + parity * (c.SPLITS * c.HEADS * c.D)
        place = place + (gl.expand_dims(split * ALL + number, 2) * c.BLOCK_D + d)
        part = gl.load(place, mask=gl.expand_dims(exists, 2), other=0.0, cache_modifier=".cg")
        part = received(part, place, 4, c)
        log = gl.convert_layout(log, lines)
        weight = gl.exp2(log - gl.max(log, 0)[None, :])
        acc = gl.sum(part.to(gl.float32) * gl.expand_dims(weight, 2), 0)
        mixed = acc * rows_of(1.0 / gl.sum(weight, 0), acc)[:, None]
        if c.TENSOR_CORES:
            store_vector(ring, i, mixed, c.FP8_WEIGHTS, c)
        else:
            target.index(i).store(mixed.to(ring.x.dtype))
    gl.thread_barrier()
