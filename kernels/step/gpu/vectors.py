"""The hidden state and other vectors of the whole-step kernel for one sequence.

Their way to shared memory, the norm, the rows of a program, and the residual stream. Where a layer's outputs are
normalized before they are added to the stream,

    stream += norm(attention output); stream += norm(MLP output)

such a norm needs the whole output, so programs publish it as it is, and each adds all of it to its copy of the residual
stream, which its consumer threads hold in registers in float32. All add in the same order, so the copies are equal.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.grid_barrier import received
from kernels.step.gpu.step_constants import COLUMNS, CONSUMER_WARPS, MOST_HELD, ROWS, address
from kernels.step.gpu.tensor_products import store_vector


@gluon.jit
def rows_of_tile(first, number, c):
    """Return the rows of a matrix in this program's tile `number`, [ROWS]; the first of its tiles is `first`."""
    tile = first + number * gl.num_programs(0)
    return tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, c.W))


@gluon.jit
def tiles_of_program(first, tiles):
    """Return how many of `tiles` tiles this program computes, the first of which is `first`."""
    return gl.maximum(tiles - first + gl.num_programs(0) - 1, 0) // gl.num_programs(0)


@gluon.constexpr_function
def lane_layout():
    """Return the register layout of vectors of 4 * COLUMNS elements, of which each thread has 4."""
    return gl.BlockedLayout([4], [32], [CONSUMER_WARPS.value], [0])


@gluon.constexpr_function
def vectors_of(inputs):
    """Return how many vectors of 4 * COLUMNS elements `inputs` elements take."""
    return -(-inputs // (4 * COLUMNS.value))


@gluon.jit
def load_gains(vector, c):
    """Load the gains of a norm, in the layout in which `normed` needs them."""
    parts = ()
    element = gl.arange(0, 4 * COLUMNS, layout=lane_layout())
    for i in gl.static_range(vectors_of(c.HIDDEN)):
        number = i * 4 * COLUMNS + element
        parts = parts + (gl.load(vector + number, mask=number < c.HIDDEN, other=0.0),)  # type: ignore[assignment]
    return parts


@gluon.jit
def held_rows(ring, first, c):
    """Load this program's rows of the hidden state in shared memory, as HIDDEN_TILES tensors of [ROWS]."""
    rows = ring.x._reinterpret(
        ring.x.dtype, [c.INPUTS // ROWS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    found = ()
    for i in gl.static_range(c.HIDDEN_TILES):
        tile = gl.minimum(first + i * gl.num_programs(0), c.HIDDEN // ROWS - 1)
        found = found + (rows.index(tile).load(gl.SliceLayout(1, c.W)),)  # type: ignore[assignment]
    return found


@gluon.jit
def share(
    ring, vector, INPUTS: gl.constexpr, PUBLISHED: gl.constexpr, MULTIPLIED: gl.constexpr, c
):  # fmt: skip
    """Copy a vector to shared memory, zeros behind it.

    PUBLISHED if programs publish it during this launch, MULTIPLIED if it is the input of a product as it is.
    """
    WIDTH: gl.constexpr = 4 * COLUMNS
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = ring.x._reinterpret(ring.x.dtype, [ring.x.shape[0] // 4, WIDTH], flat)
    element = gl.arange(0, WIDTH, layout=lane_layout())
    loaded = ()
    for i in gl.static_range(vectors_of(INPUTS)):
        number = i * WIDTH + element
        if (i + 1) * WIDTH > INPUTS:
            exists = gl.max_constancy(number < INPUTS, 4)
            numbers = gl.load(vector + number, mask=exists, other=0.0, cache_modifier=".cg")
        else:
            numbers = gl.load(vector + number, cache_modifier=".cg")
        loaded = loaded + (numbers,)  # type: ignore[assignment]
    for i in gl.static_range(vectors_of(INPUTS)):
        numbers = loaded[i]
        if PUBLISHED:
            numbers = received(numbers, vector + i * WIDTH + element, 4, c)
        if MULTIPLIED:
            store_vector(ring, i, numbers, c.FP8_WEIGHTS, c)
        else:
            x.index(i).store(numbers)
    gl.thread_barrier()


@gluon.jit
def normed(ring, gains, eps, FP8: gl.constexpr, c):
    """Normalize the hidden state in shared memory; the weights by which it is multiplied are in FP8 or not."""
    raw = ()
    WIDTH: gl.constexpr = 4 * COLUMNS
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x = ring.x._reinterpret(ring.x.dtype, [ring.x.shape[0] // 4, WIDTH], flat)
    squares = gl.zeros([WIDTH], gl.float32, layout=lane_layout())
    for i in gl.static_range(vectors_of(c.HIDDEN)):
        part = x.index(i).load(lane_layout()).to(gl.float32)
        if c.HIDDEN > MOST_HELD:
            squares += part * part
        raw = raw + (part,)  # type: ignore[assignment]
    if c.HIDDEN <= MOST_HELD:
        # Each warp adds all squares, so that no warp waits for others.
        squares = gl.zeros([COLUMNS], gl.float32, layout=gl.SliceLayout(0, c.W))
        for j in gl.static_range((c.HIDDEN + COLUMNS - 1) // COLUMNS):
            part = ring.x.index(j).load(gl.SliceLayout(0, c.W)).to(gl.float32)
            squares += part * part
    inverse = 1.0 / gl.sqrt(gl.sum(squares, 0) / c.HIDDEN + eps)
    gl.thread_barrier()
    for i in gl.static_range(vectors_of(c.HIDDEN)):
        store_vector(ring, i, raw[i] * inverse * gains[i].to(gl.float32), FP8, c)
    gl.thread_barrier()


@gluon.jit
def start_stream(ring, embedding, c):
    """Copy a token's embedding, times the factor of the model, to shared memory, zeros behind it.

    Returns:
        With POST_NORMS the residual stream: float32 tensors of 4 * COLUMNS elements; else no tensors.
    """
    stream = ()
    if c.EMBEDDING_FACTOR == 1.0 and not c.POST_NORMS:
        share(ring, embedding, c.HIDDEN, gl.constexpr(False), gl.constexpr(False), c)
    else:
        element = gl.arange(0, 4 * COLUMNS, layout=lane_layout())
        x = vectors_in(ring)
        for i in gl.static_range(vectors_of(c.HIDDEN)):
            number = i * 4 * COLUMNS + element
            exists = gl.max_constancy(number < c.HIDDEN, 4)
            scaled = gl.load(embedding + number, mask=exists, other=0.0).to(gl.float32)
            scaled = (scaled * c.EMBEDDING_FACTOR).to(ring.x.dtype)
            x.index(i).store(scaled)
            if c.POST_NORMS:
                stream = stream + (scaled.to(gl.float32),)  # type: ignore[assignment]
        gl.thread_barrier()
    return stream


@gluon.jit
def load_post_gains(table, layer, FIELD: gl.constexpr, dtype: gl.constexpr, c):
    """Load the gains of the norm after attention or MLP, as `receive_hidden` needs them; no tensors without POST_NORMS.

    `FIELD` is that of the norm before it.
    """
    gains = ()
    if c.POST_NORMS:
        vector = address(table, c.LAYERS + layer, FIELD, dtype)
        element = gl.arange(0, 4 * COLUMNS, layout=lane_layout())
        for i in gl.static_range(vectors_of(c.HIDDEN)):
            number = i * 4 * COLUMNS + element
            place = gl.multiple_of(gl.max_contiguous(vector + number, 4), 16)
            exists = gl.max_constancy(number < c.HIDDEN, 4)
            gains = gains + (gl.load(place, mask=exists, other=0.0),)  # type: ignore[assignment]
    return gains


@gluon.jit
def receive_hidden(ring, stream, vector, gains, eps, c):
    """Copy a published vector [HIDDEN] to shared memory: the hidden state, to which its programs added the residual.

    With POST_NORMS it is an output: normalize it by its `gains`, add it to the stream, and copy that instead, rounded
    to the model's dtype. Returns the stream, as `start_stream` does.
    """
    after = ()
    if not c.POST_NORMS:
        share(ring, vector, c.HIDDEN, gl.constexpr(True), gl.constexpr(False), c)
    else:
        WIDTH: gl.constexpr = 4 * COLUMNS
        element = gl.arange(0, WIDTH, layout=lane_layout())
        loaded = ()
        for i in gl.static_range(vectors_of(c.HIDDEN)):
            number = i * WIDTH + element
            exists = gl.max_constancy(number < c.HIDDEN, 4)
            numbers = gl.load(vector + number, mask=exists, other=0.0, cache_modifier=".cg")
            loaded = loaded + (numbers,)  # type: ignore[assignment]
        raw = ()
        squares = gl.zeros([WIDTH], gl.float32, layout=lane_layout())
        for i in gl.static_range(vectors_of(c.HIDDEN)):
            part = received(loaded[i], vector + i * WIDTH + element, 4, c).to(gl.float32)
            squares += part * part
            raw = raw + (part,)  # type: ignore[assignment]
        inverse = 1.0 / gl.sqrt(gl.sum(squares, 0) / c.HIDDEN + eps)
        x = vectors_in(ring)
        for i in gl.static_range(vectors_of(c.HIDDEN)):
            total = stream[i] + raw[i] * inverse * gains[i].to(gl.float32)
            x.index(i).store(total.to(ring.x.dtype))
            after = after + (total,)  # type: ignore[assignment]
        gl.thread_barrier()
    return after


@gluon.jit
def vectors_in(ring):
    """View the vector in shared memory as [INPUTS / 1024, 1024]."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring.x._reinterpret(ring.x.dtype, [ring.x.shape[0] // 4, 4 * COLUMNS], flat)
