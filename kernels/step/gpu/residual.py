"""The residual stream of the whole-step kernel where a layer's outputs are normalized before they are added to it.

    stream += norm(attention output); stream += norm(MLP output)

Such a norm needs the whole output, so programs publish it as it is, and each adds all of it to a residual stream of its
own, which its consumer threads hold in registers in float32. All add in the same order, so their streams are equal.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.grid_barrier import received
from kernels.step.gpu.products import lane_layout, share, vectors_of
from kernels.step.gpu.ring import COLUMNS, address


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
