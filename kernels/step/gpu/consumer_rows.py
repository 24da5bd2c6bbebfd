"""The consumer warps of the whole-step kernel for one or several rows: from their tokens to the next ones.

The operations and the grid barriers are those of `kernels.step.gpu.consumer`. Every vector exists once for each row,
and weights are read once for all. A hidden state is normalized in shared memory. A row is computed by the same
operations in the same order however many there are, also where several rows are of one sequence.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.attend import attend, load_head_vector, row_rotation
from kernels.step.gpu.consumer import head_gains
from kernels.step.gpu.grid_barrier import (
    COUNTER_LINE,
    HEAD_READY,
    HEADS_DONE,
    HEADS_MIXED,
    PARITY,
    arrive_grid,
    arrive_published,
    publish,
    received,
    reset_counters,
    wait_grid,
)
from kernels.step.gpu.merge_splits import combine, mix_rows, mixed_tiles
from kernels.step.gpu.products_of_rows import (
    multiply,
    multiply_long,
    norm_rows,
    outputs_of_tile,
    row_gains,
    row_layout,
    row_offsets,
    row_tiles_at_once,
    share_rows,
)
from kernels.step.gpu.score_rows import choose_rows, score_rows
from kernels.step.gpu.step_constants import (
    INPUT_NORM,
    MLP_NORM,
    QKV_BIAS,
    ROWS,
    address,
    attended,
    cache_of,
    first_key,
    first_tile,
    members_of_head,
    projected_row,
    projected_tiles,
)
from kernels.step.gpu.vectors import tiles_of_program


@gluon.jit
def consume_rows(
    ring, table, embedding, norm, ids, positions, earlier, slots, cos, sin, buffers, counter, logits, tokens, logprobs,
    sampled, sampled_rows, eps, scale, c,
):  # fmt: skip
    """Compute a step; `buffers` are the arguments of `step_of_rows` from `hidden` to `totals`.

    Loads that depend on no other program are issued before each wait, so that the wait hides their latency.
    """
    hidden, between, qkv, inner, parts, logs, mixed, best, totals = buffers
    dtype: gl.constexpr = ring.data.dtype
    QUERIES: gl.constexpr = c.HEADS * c.D
    PROJECTED: gl.constexpr = (c.HEADS + 2 * c.KV_HEADS) * c.D
    programs = gl.num_programs(0)
    attended_row, _, _, _ = attended(c)
    position = gl.load(positions + attended_row).to(gl.int32)
    slot = gl.load(slots + attended_row)
    num_earlier = gl.load(earlier + attended_row)
    used = 0
    arrivals = 0
    given = 0
    base = gl.load(counter + PARITY)
    ready = counter + HEAD_READY + gl.program_id(0) % c.KV_HEADS * COUNTER_LINE
    members = members_of_head(gl.program_id(0) % c.KV_HEADS, c)
    cosine, sine = rotation_of_rows(cos, sin, position, num_earlier, c)
    row = gl.arange(0, c.BATCH, layout=gl.SliceLayout(1, row_layout(c.BATCH)))
    offsets = (token_of(ids, sampled, row) * c.HIDDEN)[:, None]
    output_row, _ = outputs_of_tile()
    output_row = gl.minimum(output_row, c.BATCH - 1)
    first = first_tile(0, gl.constexpr(0), c)
    row_start = token_of(ids, sampled, output_row) * c.HIDDEN
    before = load_residual(embedding, row_start, first, c)
    share_rows(ring, embedding, offsets, c.HIDDEN, gl.constexpr(False), c)
    gains = row_gains(address(table, 0, INPUT_NORM, dtype), c)
    mlp_gains = row_gains(address(table, 0, MLP_NORM, dtype), c)
    q_gain, k_gain = head_gains(table, 0, cosine, dtype, c)
    offsets = row_offsets(c.HIDDEN, c)
    row_start = output_row * c.HIDDEN
    for layer in range(c.LAYERS):
        parity = (base + layer) & 1
        if c.BATCH > 1:
            # Registers do not hold them through a layer.
            cosine, sine = rotation_of_rows(cos, sin, position, num_earlier, c)
        vectors = (cosine, sine, q_gain, k_gain)
        cache = cache_of(table, layer, dtype, c)
        seen = first_key(table, layer, position, c)
        norm_rows(ring, gains, eps, c)
        bias = address(table, layer, QKV_BIAS, dtype)
        used = project_rows(ring, qkv, parity, bias, used, c)
        arrive_published(ready, c)

        heads = qkv + (parity * c.BATCH + attended_row) * PROJECTED
        used, results = attend(
            ring, heads, vectors, cache, seen, position, num_earlier, slot, parts, logs, parity, counter,
            (layer + 1) * members, used, eps, scale, c,
        )  # fmt: skip
        given += results
        wait_grid(counter + HEADS_DONE, given, gl.constexpr(False))
        if c.BATCH == 1:
            combine(ring, parts, logs, parity, seen, position, c)
        else:
            tiles = gl.minimum(mixed_tiles(c.BATCH * QUERIES), programs)
            if gl.program_id(0) < tiles:
                mix_rows(parts, logs, mixed, parity, c)
                arrive_published(counter + HEADS_MIXED, c)
            wait_grid(counter + HEADS_MIXED, (layer + 1) * tiles, gl.constexpr(False))
            vector = mixed + parity * (c.BATCH * QUERIES)
            share_rows(ring, vector, row_offsets(QUERIES, c), QUERIES, gl.constexpr(True), c)
        first = first_tile(layer, gl.constexpr(0), c)
        used = add_residual(ring, before, between, parity, first, used, QUERIES, c)
        arrive_published(counter, c)
        arrivals += programs

        wait_grid(counter, arrivals, c.EARLY)
        vector = between + parity * (c.BATCH * c.HIDDEN)
        last = first_tile(layer, (c.HIDDEN + c.INNER) // ROWS, c)
        before = load_residual(vector, row_start, last, c)
        share_rows(ring, vector, offsets, c.HIDDEN, gl.constexpr(True), c)
        before = receive_residual(before, vector, row_start, last, c)
        norm_rows(ring, mlp_gains, eps, c)
        used = gate_rows(ring, inner, parity, first_tile(layer, c.HIDDEN // ROWS, c), used, c)
        arrive_published(counter, c)
        arrivals += programs

        following = norm
        if layer + 1 < c.LAYERS:
            following = address(table, layer + 1, INPUT_NORM, dtype)
        gains = row_gains(following, c)
        wait_grid(counter, arrivals, gl.constexpr(False))
        vector = inner + parity * (c.BATCH * c.INNER)
        share_rows(ring, vector, row_offsets(c.INNER, c), c.INNER, gl.constexpr(True), c)
        used = add_residual(ring, before, hidden, parity, last, used, c.INNER, c)
        arrive_published(counter, c)
        arrivals += programs

        next_layer = gl.minimum(layer + 1, c.LAYERS - 1)
        mlp_gains = row_gains(address(table, next_layer, MLP_NORM, dtype), c)
        q_gain, k_gain = head_gains(table, next_layer, cosine, dtype, c)
        wait_grid(counter, arrivals, gl.constexpr(False))
        vector = hidden + parity * (c.BATCH * c.HIDDEN)
        first = first_tile(layer + 1, gl.constexpr(0), c)
        before = load_residual(vector, row_start, first, c)
        share_rows(ring, vector, offsets, c.HIDDEN, gl.constexpr(True), c)
        before = receive_residual(before, vector, row_start, first, c)

    norm_rows(ring, gains, eps, c)
    score_rows(ring, logits, best, totals, used, c)
    arrive_grid(counter)
    if gl.program_id(0) == 0:
        wait_grid(counter, arrivals + programs, gl.constexpr(False))
        choose_rows(best, totals, tokens, logprobs, sampled, sampled_rows, c)
        reset_counters(counter, base, c)


@gluon.jit
def rotation_of_rows(cos, sin, position, earlier, c):
    """Load the cosine and the sine of the heads that a program brings, which are all of one token in a step of one."""
    if c.BATCH == 1:
        cosine = load_head_vector(cos + position * c.D, c)
        sine = load_head_vector(sin + position * c.D, c)
    else:
        cosine, sine = row_rotation(cos, sin, position, earlier, c)
    return cosine, sine


@gluon.jit
def token_of(ids, sampled, row):
    """Load the tokens of sequences; an id of -1 - i selects `sampled[i]`."""
    token = gl.load(ids + row)
    return gl.where(token < 0, gl.load(sampled + (-1 - token), mask=token < 0, other=0), token)


@gluon.jit
def load_residual(vectors, offsets, first, c):
    """Load the places of the hidden states that this program adds to, as HIDDEN_TILES tensors of [SUMS].

    `offsets` are where the vectors of the sums' rows begin; `first` is the first tile of the matrix.
    """
    found = ()
    for i in gl.static_range(c.HIDDEN_TILES):
        place = residual_places(vectors, offsets, first, i, c)
        found = found + (gl.load(place, cache_modifier=".cg"),)  # type: ignore[assignment]
    return found


@gluon.jit
def receive_residual(loaded, vectors, offsets, first, c):
    """Reload the numbers of `load_residual` that had not arrived. Loads issued in between do not wait for them."""
    found = ()
    for i in gl.static_range(c.HIDDEN_TILES):
        place = residual_places(vectors, offsets, first, i, c)
        found = found + (received(loaded[i], place, 2, c),)  # type: ignore[assignment]
    return found


@gluon.jit
def residual_places(vectors, offsets, first, i, c):
    """Return the addresses of this program's tile number `i` of the hidden states."""
    _, output = outputs_of_tile()
    tile = gl.minimum(first + i * gl.num_programs(0), c.HIDDEN // ROWS - 1)
    return vectors + (offsets + (tile * ROWS + output))


@gluon.jit
def project_rows(ring, out, parity, bias, used, c):
    """Compute this program's queries, keys and values of all sequences."""
    EACH: gl.constexpr = row_tiles_at_once(c.HIDDEN, c.STAGES, c.FP8_WEIGHTS)
    count = projected_tiles(c)
    for i in range(count // EACH):
        used = project(ring, out, parity, bias, i * EACH, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            used = project(ring, out, parity, bias, count - n, used, gl.constexpr(n), c)
    return used


@gluon.jit
def project(ring, out, parity, bias, number, used, TILES: gl.constexpr, c):
    """Compute TILES tiles of queries, keys and values."""
    PROJECTED: gl.constexpr = (c.HEADS + 2 * c.KV_HEADS) * c.D
    sums, used = multiply(ring, used, c.HIDDEN, TILES, c.FP8_WEIGHTS, c)
    row, output = outputs_of_tile()
    for t in gl.static_range(TILES):
        place = projected_row(number + t, c) + output
        y = sums[t]
        if c.BIAS:
            y = y + gl.load(bias + place).to(gl.float32)
        publish(out, c.BATCH * PROJECTED, parity, row * PROJECTED + place, y, row < c.BATCH, c)
    return used


@gluon.jit
def gate_rows(ring, out, parity, first, used, c):
    """Compute this program's part of the gated products of all sequences."""
    EACH: gl.constexpr = max(1, row_tiles_at_once(c.HIDDEN, c.STAGES, c.FP8_WEIGHTS) // 2)
    count = tiles_of_program(first, c.INNER // ROWS)
    for i in range(count // EACH):
        used = gate(ring, out, parity, first, i * EACH, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            used = gate(ring, out, parity, first, count - n, used, gl.constexpr(n), c)
    return used


@gluon.jit
def gate(ring, out, parity, first, number, used, PAIRS: gl.constexpr, c):
    """Compute PAIRS tiles of the gated products."""
    sums, used = multiply(ring, used, c.HIDDEN, gl.constexpr(2 * PAIRS), c.FP8_WEIGHTS, c)
    row, output = outputs_of_tile()
    for t in gl.static_range(PAIRS):
        x = sums[2 * t]
        value = x / (1.0 + gl.exp(-x)) * sums[2 * t + 1]
        place = (first + (number + t) * gl.num_programs(0)) * ROWS + output
        publish(out, c.BATCH * c.INNER, parity, row * c.INNER + place, value, row < c.BATCH, c)
    return used


@gluon.jit
def add_residual(ring, before, out, parity, first, used, INPUTS: gl.constexpr, c):
    """Multiply this program's rows of weights by the vectors in shared memory and add the residuals."""
    row, output = outputs_of_tile()
    for i in gl.static_range(len(before)):
        tile = first + i * gl.num_programs(0)
        if tile < c.HIDDEN // ROWS:
            y, used = multiply_long(ring, used, INPUTS, c.FP8_WEIGHTS, c)
            y += before[i].to(gl.float32)
            place = row * c.HIDDEN + tile * ROWS + output
            publish(out, c.BATCH * c.HIDDEN, parity, place, y, row < c.BATCH, c)
    return used
