"""The consumers of the whole-step kernel: what a decoder computes for one token, from its embedding to the next token.

    norm, qkv | norms per head, rotation, cache write, attention | output, residual | norm, gate, up, SiLU |
    down, residual

A bar stands for the grid barrier. What crosses it goes through global memory, a few KB each. Sums are added up in a
fixed order. Knows no addresses of weights, which arrive in the ring.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.fused.step_attend import attend, combine, load_head_vector
from kernels.fused.step_ring import (
    COLUMNS,
    CONSUMER_WARPS,
    HEADS_DONE,
    INPUT_NORM,
    K_NORM,
    KEYS,
    MLP_NORM,
    MOST_PROGRAMS,
    Q_NORM,
    QKV_BIAS,
    ROWS,
    VALUES,
    address,
    arrive_grid,
    parts_of,
    release,
    wait_full,
    wait_grid,
)

_LOWEST_KEY = gl.constexpr(-(2**63))
_MINUS_INFINITY = gl.constexpr(-0x7F800001)


@gluon.jit
def consume(
    ring, table, embedding, norm, ids, positions, slots, cos, sin, room, counter, logits, tokens, logprobs, drawn,
    eps, scale, c,
):  # fmt: skip
    """Compute a step; `room` as in `whole_step`.

    What depends on no other program is asked for before each wait, so that memory answers meanwhile.
    """
    hidden, qkv, inner, parts, logs, best, totals = room
    dtype: gl.constexpr = ring.data.dtype
    QUERIES: gl.constexpr = c.HEADS * c.D
    programs = gl.num_programs(0)
    position = gl.load(positions).to(gl.int32)
    slot = gl.load(slots)
    token = gl.load(ids)
    if token < 0:
        token = gl.load(drawn + (-1 - token))
    x = embedding + token * c.HIDDEN
    used = 0
    arrivals = 0
    cosine = load_head_vector(cos + position * c.D, c)
    sine = load_head_vector(sin + position * c.D, c)
    gains = load_parts(address(table, 0, INPUT_NORM, dtype), c.HIDDEN, c)
    for layer in range(c.LAYERS):
        q_gain, k_gain = head_gains(table, layer, cosine, dtype, c)
        vectors = (cosine, sine, q_gain, k_gain)
        mlp_gains = load_parts(address(table, layer, MLP_NORM, dtype), c.HIDDEN, c)
        cache = (address(table, layer, KEYS, dtype), address(table, layer, VALUES, dtype))
        before = load_own(x, c)
        if layer > 0:
            wait_grid(counter, arrivals)
        share(ring, x, c.HIDDEN)
        xs = normed(ring, gains, eps, c)
        bias = address(table, layer, QKV_BIAS, dtype)
        used = project_all(ring, xs, qkv, bias, used, c)
        arrive_grid(counter)
        arrivals += programs

        used, items = attend(
            ring, qkv, vectors, cache, position, slot, parts, logs, counter, arrivals, used, eps, scale, c
        )  # fmt: skip
        wait_grid(counter + HEADS_DONE, (layer + 1) * items)
        combine(ring, parts, logs, position, c)
        used = add_rows(ring, before, hidden, used, QUERIES, c)
        x = hidden
        arrive_grid(counter)
        arrivals += programs

        before = load_own(hidden, c)
        wait_grid(counter, arrivals)
        share(ring, hidden, c.HIDDEN)
        xs = normed(ring, mlp_gains, eps, c)
        used = gate_all(ring, xs, inner, used, c)
        arrive_grid(counter)
        arrivals += programs

        following = norm
        if layer + 1 < c.LAYERS:
            following = address(table, layer + 1, INPUT_NORM, dtype)
        gains = load_parts(following, c.HIDDEN, c)
        wait_grid(counter, arrivals)
        share(ring, inner, c.INNER)
        used = add_rows(ring, before, hidden, used, c.INNER, c)
        arrive_grid(counter)
        arrivals += programs

    wait_grid(counter, arrivals)
    share(ring, hidden, c.HIDDEN)
    xs = normed(ring, gains, eps, c)
    score_all(ring, xs, logits, best, totals, used, c)
    arrive_grid(counter)
    if gl.program_id(0) == 0:
        wait_grid(counter, arrivals + programs)
        choose(best, totals, tokens, logprobs, drawn)
        gl.store(counter + HEADS_DONE, 0)
        gl.store(counter, 0)  # for the next step: no program waits any more


@gluon.jit
def head_gains(table, layer, ones, dtype: gl.constexpr, c):
    """Load the gains of queries and keys; anything of their shape where the family has none."""
    if c.NORMS:
        q_gain = load_head_vector(address(table, layer, Q_NORM, dtype), c)
        k_gain = load_head_vector(address(table, layer, K_NORM, dtype), c)
        return q_gain, k_gain
    return ones, ones


@gluon.jit
def rows_of_tile(number, c):
    """Return which rows of a matrix are those of this program's tile `number`."""
    tile = gl.program_id(0) + number * gl.num_programs(0)
    return tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))


@gluon.jit
def project_all(ring, xs, out, bias, used, c):
    """Compute this program's queries, keys and values."""
    TILES: gl.constexpr = (c.HEADS + 2 * c.KV_HEADS) * c.D // ROWS
    EACH: gl.constexpr = max(1, 4 * c.PARTS * COLUMNS // c.HIDDEN)
    count = tiles_of_program(TILES)
    for i in range(count // EACH):
        used = project(ring, xs, out, bias, i * EACH, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            used = project(ring, xs, out, bias, count - n, used, gl.constexpr(n), c)
    return used


@gluon.jit
def gate_all(ring, xs, out, used, c):
    """Compute this program's part of the gated product."""
    EACH: gl.constexpr = max(1, 3 * c.PARTS * COLUMNS // c.HIDDEN)
    count = tiles_of_program(c.INNER // ROWS)
    for i in range(count // EACH):
        used = gate(ring, xs, out, i * EACH, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            used = gate(ring, xs, out, count - n, used, gl.constexpr(n), c)
    return used


@gluon.jit
def score_all(ring, xs, logits, best, totals, used, c):
    """Compute and store this program's scores, their largest key and the sum of their exponentials."""
    EACH: gl.constexpr = max(1, 4 * c.PARTS * COLUMNS // c.HIDDEN)
    key = gl.full([ROWS], _LOWEST_KEY, gl.int64, layout=gl.SliceLayout(1, c.W))
    total = gl.zeros([ROWS], gl.float32, layout=gl.SliceLayout(1, c.W))
    count = tiles_of_program(c.VOCAB // ROWS)
    for i in range(count // EACH):
        key, total, used = score(ring, xs, logits, i * EACH, key, total, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            key, total, used = score(
                ring, xs, logits, count - n, key, total, used, gl.constexpr(n), c
            )
    largest = gl.max(key, 0)
    gl.store(best + gl.program_id(0), largest)
    gl.store(totals + gl.program_id(0), gl.sum(total * exponentials(key, largest), 0))


@gluon.jit
def tiles_of_program(tiles):
    """Return how many of so many tiles are this program's."""
    return (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def project(ring, xs, out, bias, number, used, TILES: gl.constexpr, c):
    """Compute some tiles of queries, keys and values."""
    dtype: gl.constexpr = ring.data.dtype
    sums, used = dot_held(ring, xs, used, TILES, c)
    for t in gl.static_range(TILES):
        row = rows_of_tile(number + t, c)
        y = sums[t]
        if c.BIAS:
            y = y + gl.load(bias + row).to(gl.float32)
        gl.store(out + row, y.to(dtype))
    return used


@gluon.jit
def gate(ring, xs, out, number, used, PAIRS: gl.constexpr, c):
    """Compute some tiles of the gated product."""
    sums, used = dot_held(ring, xs, used, gl.constexpr(2 * PAIRS), c)
    for t in gl.static_range(PAIRS):
        x = sums[2 * t]
        value = (x / (1.0 + gl.exp(-x)) * sums[2 * t + 1]).to(ring.data.dtype)
        gl.store(out + rows_of_tile(number + t, c), value)
    return used


@gluon.jit
def score(ring, xs, logits, number, key, total, used, TILES: gl.constexpr, c):
    """Compute and store some tiles of scores; returns each warp's largest key and sum of exponentials so far, too."""
    sums, used = dot_held(ring, xs, used, TILES, c)
    keys = ()
    largest = key
    for t in gl.static_range(TILES):
        row = rows_of_tile(number + t, c)
        rounded = sums[t].to(logits.dtype.element_ty)
        gl.store(logits + row, rounded)
        keys = keys + (ranking_keys(rounded.to(gl.float32), row),)  # type: ignore[assignment]
        largest = gl.maximum(largest, keys[t])
    total *= exponentials(key, largest)
    for t in gl.static_range(TILES):
        total += exponentials(keys[t], largest)
    return largest, total, used


@gluon.jit
def choose(best, totals, tokens, logprobs, drawn):
    """Choose the largest of all programs' keys."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [CONSUMER_WARPS], [0])
    number = gl.arange(0, MOST_PROGRAMS, layout=layout)
    exists = number < gl.num_programs(0)
    keys = gl.load(best + number, mask=exists, other=_LOWEST_KEY, cache_modifier=".cg")
    sums = gl.load(totals + number, mask=exists, other=0.0, cache_modifier=".cg")
    key = gl.max(keys, 0)
    chosen = 0x7FFFFFFF - (key & 0x7FFFFFFF)
    bits = key >> 32
    finite = (bits < 0x7F800000) & (bits > -0x7F800001)
    gl.store(drawn, chosen)
    gl.store(tokens, gl.where(finite, chosen, -1))
    total = gl.sum(sums * exponentials(keys, key), 0)
    gl.store(logprobs, 0.0 - gl.log(gl.maximum(total, 1.0)))


@gluon.jit
def exponentials(keys, largest):
    """As `kernels.fused.device.exponentials`, of keys."""
    bits = (keys >> 32).to(gl.int32)
    return gl.where(bits > _MINUS_INFINITY, gl.exp(ranked_value(keys) - ranked_value(largest)), 0.0)


@gluon.jit
def ranked_value(key):
    """Return the float32 in a key."""
    bits = (key >> 32).to(gl.int32)
    return gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(gl.float32, bitcast=True)


@gluon.jit
def ranking_keys(values, ids):
    """As `kernels.fused.device.ranking_keys`."""
    values = gl.where(values == 0.0, 0.0, values)
    bits = values.to(gl.int32, bitcast=True)
    bits = gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = gl.where(values != values, 0x7FFFFFFF, bits)
    return (bits.to(gl.int64) << 32) | (0x7FFFFFFF - ids).to(gl.int64)


@gluon.jit
def load_parts(vector, INPUTS: gl.constexpr, c):
    """Load a vector to every warp, COLUMNS elements a tensor."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, c.W))
    parts = ()
    for j in gl.static_range(INPUTS // COLUMNS):
        place = gl.multiple_of(gl.max_contiguous(vector + (j * COLUMNS + column), 8), 16)
        parts = parts + (gl.load(place),)  # type: ignore[assignment]
    return parts


@gluon.jit
def normed(ring, gains, eps, c):
    """Load the hidden state from shared memory and normalise it, float32, in every warp."""
    squares = gl.zeros([COLUMNS], gl.float32, layout=gl.SliceLayout(0, c.W))
    raw = ()
    for j in gl.static_range(c.HIDDEN // COLUMNS):
        part = ring.x.index(j).load(gl.SliceLayout(0, c.W)).to(gl.float32)
        squares += part * part
        raw = raw + (part,)  # type: ignore[assignment]
    inverse = 1.0 / gl.sqrt(gl.sum(squares, 0) / c.HIDDEN + eps)
    xs = ()
    for j in gl.static_range(c.HIDDEN // COLUMNS):
        xs = xs + (raw[j] * inverse * gains[j].to(gl.float32),)  # type: ignore[assignment]
    return xs


@gluon.jit
def dot_held(ring, xs, used, TILES: gl.constexpr, c):
    """Multiply the next tiles of weights by a vector held in registers: TILES times [ROWS] float32."""
    EACH: gl.constexpr = len(xs) // c.PARTS
    ALL: gl.constexpr = TILES * EACH
    AT_ONCE: gl.constexpr = 2 if ALL % 2 == 0 else 1
    tiles = ()
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=c.W)
    for i in gl.static_range(ALL):
        if i % AT_ONCE == 0:
            for k in gl.static_range(AT_ONCE):
                wait_full(ring, used + i + k, c)
        parts = parts_of(ring, (used + i) % c.STAGES, c)
        for j in gl.static_range(c.PARTS):
            weights = parts.index(j).load(c.W).to(gl.float32)
            sums += weights * xs[i % EACH * c.PARTS + j][None, :]
        if i % EACH == EACH - 1:
            tiles = tiles + (sums,)  # type: ignore[assignment]
            sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=c.W)
    release(ring, used, ALL, c)
    totals = ()
    for t in gl.static_range(TILES):
        totals = totals + (gl.sum(tiles[t], 1),)  # type: ignore[assignment]
    return totals, used + ALL


@gluon.jit
def load_own(x, c):
    """Load what this program's rows of the hidden state are added to, ROWS a tensor."""
    before = ()
    for i in gl.static_range(c.OWN):
        tile = gl.program_id(0) + i * gl.num_programs(0)
        row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))
        before = before + (gl.load(x + row, mask=row < c.HIDDEN, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
    return before


@gluon.jit
def add_rows(ring, before, out, used, INPUTS: gl.constexpr, c):
    """Multiply this program's rows by the vector in shared memory and add the residual."""
    for i in gl.static_range(len(before)):
        tile = gl.program_id(0) + i * gl.num_programs(0)
        if tile < c.HIDDEN // ROWS:
            y, used = dot_shared(ring, used, INPUTS, c)
            row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))
            sums = (y + before[i].to(gl.float32)).to(out.dtype.element_ty)
            gl.store(out + row, sums)
    return used


@gluon.jit
def dot_shared(ring, used, INPUTS: gl.constexpr, c):
    """Multiply the next ROWS rows of weights by the vector in shared memory: [ROWS] float32."""
    BATCH: gl.constexpr = stages_at_once(INPUTS // (COLUMNS * c.PARTS))
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, layout=c.W)
    for i in range(INPUTS // (COLUMNS * c.PARTS * BATCH)):
        for b in gl.static_range(BATCH):
            wait_full(ring, used + b, c)
        for b in gl.static_range(BATCH):
            parts = parts_of(ring, (used + b) % c.STAGES, c)
            for j in gl.static_range(c.PARTS):
                weights = parts.index(j).load(c.W).to(gl.float32)
                part = (i * BATCH + b) * c.PARTS + j
                x = ring.x.index(part).load(gl.SliceLayout(0, c.W)).to(gl.float32)
                sums += weights * x[None, :]
        release(ring, used, BATCH, c)
        used += BATCH
    return gl.sum(sums, 1), used


@gluon.constexpr_function
def stages_at_once(stages):
    """How many stages are read between two barriers: as many as divide all of them, 4 at most."""
    return next(n for n in (4, 3, 2, 1) if stages % n == 0)


@gluon.jit
def share(ring, vector, INPUTS: gl.constexpr):
    """Bring a vector to shared memory."""
    WIDTH: gl.constexpr = 4 * COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [CONSUMER_WARPS], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = ring.x._reinterpret(ring.x.dtype, [ring.x.shape[0] // 4, WIDTH], flat)
    element = gl.arange(0, WIDTH, layout=layout)
    loaded = ()
    for i in gl.static_range(INPUTS // WIDTH):
        loaded = loaded + (gl.load(vector + i * WIDTH + element, cache_modifier=".cg"),)  # type: ignore[assignment]
    for i in gl.static_range(INPUTS // WIDTH):
        x.index(i).store(loaded[i])
    gl.thread_barrier()
