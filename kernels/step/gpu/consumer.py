"""The consumer warps of the whole-step kernel: compute the decoder for one token, from its embedding to the next token.

    norm, qkv | norms per head, rotation, cache write, attention | output, residual | norm, gate, up, activation |
    down, residual

A bar is the grid barrier. Data crosses it through global memory, a few KB each time. Sums are added in a fixed order.
Weights arrive in the ring, filled by `kernels.step.gpu.producer`.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.attend import attend, load_head_vector
from kernels.step.gpu.grid_barrier import (
    COUNTER_LINE,
    HEAD_READY,
    HEADS_DONE,
    PARITY,
    arrive_grid,
    arrive_published,
    publish,
    reset_counters,
    wait_grid,
)
from kernels.step.gpu.merge_splits import combine
from kernels.step.gpu.score import choose, score_all
from kernels.step.gpu.step_constants import (
    INPUT_NORM,
    K_NORM,
    MLP_NORM,
    Q_NORM,
    QKV_BIAS,
    ROWS,
    address,
    cache_of,
    first_key,
    first_tile,
    members_of_head,
    projected_row,
    projected_tiles,
    window_of,
)
from kernels.step.gpu.tensor_products import multiply, tensor_tiles_at_once
from kernels.step.gpu.vectors import (
    held_rows,
    load_gains,
    load_post_gains,
    normed,
    receive_hidden,
    rows_of_tile,
    share,
    start_stream,
    tiles_of_program,
)

_GELU_SLOPE = gl.constexpr(2.0 * math.sqrt(2.0 / math.pi))
_GELU_CUBE = gl.constexpr(0.044715)


@gluon.jit
def consume(
    ring, table, embedding, norm, ids, positions, slots, ropes, buffers, counter, logits, tokens, logprobs, sampled,
    eps, scale, c,
):  # fmt: skip
    """Compute a step; `ropes` and `buffers` are the arguments of `whole_step` from `cos` and from `hidden` on.

    Loads that depend on no other program are issued before each wait, so that the wait hides their latency.
    """
    hidden, between, qkv, inner, parts, logs, best, totals = buffers
    dtype: gl.constexpr = ring.data.dtype
    norm_dtype: gl.constexpr = norm.dtype.element_ty
    QUERIES: gl.constexpr = c.HEADS * c.D
    programs = gl.num_programs(0)
    position = gl.load(positions).to(gl.int32)
    slot = gl.load(slots)
    token = gl.load(ids)
    if token < 0:
        token = gl.load(sampled + (-1 - token))
    x = embedding + token * c.HIDDEN
    used = 0
    arrivals = 0
    results = 0
    base = gl.load(counter + PARITY)
    ready = counter + HEAD_READY + gl.program_id(0) % c.KV_HEADS * COUNTER_LINE
    members = members_of_head(gl.program_id(0) % c.KV_HEADS, c)
    PROJECTED: gl.constexpr = (c.HEADS + 2 * c.KV_HEADS) * c.D
    cosine, sine = rotation(table, 0, ropes, position, c)
    stream = start_stream(ring, x, c)
    gains = load_gains(address(table, 0, INPUT_NORM, norm_dtype), c)
    mlp_gains = load_gains(address(table, 0, MLP_NORM, norm_dtype), c)
    q_gain, k_gain = head_gains(table, 0, cosine, norm_dtype, c)
    for layer in range(c.LAYERS):
        parity = (base + layer) & 1
        vectors = (cosine, sine, q_gain, k_gain)
        cache = cache_of(table, layer, dtype, c)
        first = first_tile(layer, gl.constexpr(0), c)
        before = held_rows(ring, first, c)
        seen = first_key(table, layer, position, c)
        normed(ring, gains, eps, c.FP8_WEIGHTS, c)
        bias = address(table, layer, QKV_BIAS, dtype)
        used = project_all(ring, qkv, parity, bias, used, c)
        arrive_published(ready, c)

        used, items = attend(
            ring, qkv + parity * PROJECTED, vectors, cache, seen, position, gl.constexpr(0), slot, parts, logs,
            parity, counter, (layer + 1) * members, used, eps, scale, c,
        )  # fmt: skip
        given = (layer + 1) * items
        if c.WINDOWS:
            # A layer with a window may have fewer splits than one without.
            results += items
            given = results
        wait_grid(counter + HEADS_DONE, given, gl.constexpr(False))
        combine(ring, parts, logs, parity, seen, position, c)
        used = add_rows(ring, before, between, parity, first, used, QUERIES, c)
        arrive_published(counter, c)
        arrivals += programs

        post_gains = load_post_gains(table, layer, INPUT_NORM, norm_dtype, c)
        gate_gains = mlp_gains
        if c.POST_NORMS:
            # Attention has no registers for them beside the residual stream.
            gate_gains = load_gains(address(table, layer, MLP_NORM, norm_dtype), c)
        wait_grid(counter, arrivals, c.EARLY)
        stream = receive_hidden(ring, stream, between + parity * c.HIDDEN, post_gains, eps, c)
        first = first_tile(layer, c.HIDDEN // ROWS, c)
        hidden_tile = first_tile(layer, (c.HIDDEN + c.INNER) // ROWS, c)
        before = held_rows(ring, hidden_tile, c)
        normed(ring, gate_gains, eps, c.FP8_WEIGHTS, c)
        used = gate_all(ring, inner, parity, first, used, c)
        arrive_published(counter, c)
        arrivals += programs

        following = norm
        if layer + 1 < c.LAYERS:
            following = address(table, layer + 1, INPUT_NORM, norm_dtype)
        gains = load_gains(following, c)
        wait_grid(counter, arrivals, gl.constexpr(False))
        share(ring, inner + parity * c.INNER, c.INNER, gl.constexpr(True), gl.constexpr(True), c)
        used = add_rows(ring, before, hidden, parity, hidden_tile, used, c.INNER, c)
        arrive_published(counter, c)
        arrivals += programs

        next_layer = gl.minimum(layer + 1, c.LAYERS - 1)
        if not c.POST_NORMS:
            mlp_gains = load_gains(address(table, next_layer, MLP_NORM, norm_dtype), c)
        q_gain, k_gain = head_gains(table, next_layer, cosine, norm_dtype, c)
        if c.LOCAL_ROPE:
            cosine, sine = rotation(table, next_layer, ropes, position, c)
        post_gains = load_post_gains(table, layer, MLP_NORM, norm_dtype, c)
        wait_grid(counter, arrivals, gl.constexpr(False))
        stream = receive_hidden(ring, stream, hidden + parity * c.HIDDEN, post_gains, eps, c)

    normed(ring, gains, eps, gl.constexpr(False), c)
    score_all(ring, logits, best, totals, used, c)
    arrive_grid(counter)
    if gl.program_id(0) == 0:
        wait_grid(counter, arrivals + programs, gl.constexpr(False))
        choose(best, totals, tokens, logprobs, sampled)
        reset_counters(counter, base, c)


@gluon.jit
def rotation(table, layer, ropes, position, c):
    """Load the cosine and the sine by which a layer rotates the token's heads, of the tables of all positions."""
    cos, sin, local_cos, local_sin = ropes
    if c.LOCAL_ROPE and window_of(table, layer) > 0:
        cos = local_cos
        sin = local_sin
    cosine = load_head_vector(cos + position * c.D, c)
    return cosine, load_head_vector(sin + position * c.D, c)


@gluon.jit
def head_gains(table, layer, ones, dtype: gl.constexpr, c):
    """Load the gains of the query and key norms; without such norms, return `ones`, whose values are not used."""
    if c.NORMS:
        q_gain = load_head_vector(address(table, layer, Q_NORM, dtype), c)
        k_gain = load_head_vector(address(table, layer, K_NORM, dtype), c)
    else:
        q_gain = ones
        k_gain = ones
    return q_gain, k_gain


@gluon.jit
def project_all(ring, out, parity, bias, used, c):
    """Compute this program's queries, keys and values."""
    EACH: gl.constexpr = tensor_tiles_at_once(c.HIDDEN, c.FP8_WEIGHTS, c.STAGES, 4)
    count = projected_tiles(c)
    for i in range(count // EACH):
        used = project(ring, out, parity, bias, i * EACH, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            used = project(ring, out, parity, bias, count - n, used, gl.constexpr(n), c)
    return used


@gluon.jit
def gate_all(ring, out, parity, first, used, c):
    """Compute this program's part of the gated product."""
    EACH: gl.constexpr = tensor_tiles_at_once(c.HIDDEN, c.FP8_WEIGHTS, c.STAGES // 2, 3)
    count = tiles_of_program(first, c.INNER // ROWS)
    for i in range(count // EACH):
        used = gate(ring, out, parity, first, i * EACH, used, EACH, c)
    for n in gl.static_range(1, EACH):
        if count % EACH == n:
            used = gate(ring, out, parity, first, count - n, used, gl.constexpr(n), c)
    return used


@gluon.jit
def project(ring, out, parity, bias, number, used, TILES: gl.constexpr, c):
    """Compute TILES tiles of queries, keys and values."""
    PROJECTED: gl.constexpr = (c.HEADS + 2 * c.KV_HEADS) * c.D
    sums, used = multiply(ring, used, c.HIDDEN, TILES, c.FP8_WEIGHTS, c)
    for t in gl.static_range(TILES):
        row = projected_row(number + t, c) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))
        y = sums[t]
        if c.BIAS:
            y = y + gl.load(bias + row).to(gl.float32)
        publish(out, PROJECTED, parity, row, y, gl.constexpr(True), c)
    return used


@gluon.jit
def gate(ring, out, parity, first, number, used, PAIRS: gl.constexpr, c):
    """Compute PAIRS tiles of the gated product."""
    PAIR: gl.constexpr = 2 * PAIRS
    sums, used = multiply(ring, used, c.HIDDEN, PAIR, c.FP8_WEIGHTS, c)
    for t in gl.static_range(PAIRS):
        x = sums[2 * t]
        value = x / (1.0 + gl.exp(-logit(x, c))) * sums[2 * t + 1]
        row = rows_of_tile(first, number + t, c)
        publish(out, c.INNER, parity, row, value, gl.constexpr(True), c)
    return used


@gluon.jit
def logit(x, c):
    """Return y such that the activation of x is x * sigmoid(y).

    Source: Hendrycks and Gimpel, Gaussian Error Linear Units, 2016; 0.5 (1 + tanh(z)) = sigmoid(2 z).
    """
    y = x
    if c.GELU_TANH:
        y = _GELU_SLOPE * (x + _GELU_CUBE * x * x * x)
    return y


@gluon.jit
def add_rows(ring, before, out, parity, first, used, INPUTS: gl.constexpr, c):
    """Multiply this program's rows of weights by the vector in shared memory and add the residual.

    With POST_NORMS, all programs add the products to the residual stream when they receive them.
    """
    for i in gl.static_range(len(before)):
        tile = first + i * gl.num_programs(0)
        if tile < c.HIDDEN // ROWS:
            sums, used = multiply(ring, used, INPUTS, gl.constexpr(1), c.FP8_WEIGHTS, c)
            y = sums[0]
            row = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))
            if not c.POST_NORMS:
                y += before[i].to(gl.float32)
            publish(out, c.HIDDEN, parity, row, y, gl.constexpr(True), c)
    return used
