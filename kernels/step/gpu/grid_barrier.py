"""Communication between the programs of the whole-step kernel: published vectors and the grid barrier.

With EARLY, a published number shows by itself whether it has arrived: its place holds `MISSING` until then, and a
reader that finds `MISSING` loads again. A program therefore arrives at the barrier without waiting until its numbers
are visible, which takes as long as the barrier itself. The barrier only delays readers until the first load nearly
always succeeds.

    layer n        writes half t of a vector, clears half 1 - t, which layer n - 1 wrote and no program reads any more
    layer n + 1    writes half 1 - t ...

Places are empty before they are filled:

- A program writes only places that it has cleared itself, so its two writes are in order. Its tiles are the same in all
  layers, also those of merged splits.
- No program still reads what it clears. It clears half 1 - t of a vector in layer n, after it has waited for all
  programs since layer n - 1, and no program arrived there before it had read that half.
- No program reads a number of layer n - 1 in layer n + 1. Each executes a fence while it waits for a layer's output
  projection (`wait_grid`), and its next arrival, for which all programs wait, makes its earlier clears visible: those
  of layer n up to the output projection by the fence in layer n, the others by that in layer n + 1, which all wait
  for before they read the results of the MLP.

`tests/kernels/step/schedule/proof.py` proves this for a launch, with the assumptions about the GPU's memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COUNTER_LINE = gl.constexpr(32)
"""Elements from one counter to the next: each counter has its own cache line."""
PARITY = gl.constexpr(1)
"""Index among the counters of the half of the vectors that the next step begins with."""
HEADS_DONE = gl.constexpr(32)
"""Index of the counter of programs that have attended."""
HEADS_MIXED = gl.constexpr(64)
"""Index of the counter of programs that have merged splits of several rows."""
HEAD_READY = gl.constexpr(96)
"""Index of the counter of programs that have projected the first key-value head; those of other heads follow."""
MISSING = gl.constexpr(-1)
"""Bits of a number that has not arrived: a NaN that no conversion produces."""


@gluon.constexpr_function
def bits_of(dtype):
    """Return the integers that have the size of published numbers, and a NaN among them that is not `MISSING`."""
    return (gl.int16, 0x7FFF) if dtype.primitive_bitwidth == 16 else (gl.int32, 0x7FFFFFFF)


@gluon.jit
def publish(vector, size, parity, place, values, exists, c):
    """Write this program's numbers to half `parity` of a vector [2, size], and clear their places in the other half.

    `exists` masks them.
    """
    dtype: gl.constexpr = vector.dtype.element_ty
    INTEGER: gl.constexpr = bits_of(dtype)[0]
    NAN: gl.constexpr = bits_of(dtype)[1]
    bits = values.to(dtype).to(INTEGER, bitcast=True)
    there = gl.where(bits == MISSING, NAN, bits.to(gl.int32)).to(INTEGER)
    half = vector.to(gl.pointer_type(INTEGER)) + parity * size
    store_relaxed(half + place, there, exists)
    if c.EARLY:
        clear(vector, size, parity, place, exists)


@gluon.jit
def clear(vector, size, parity, place, exists):
    """Clear places of a vector [2, size] in the half that is not `parity`; `exists` masks them."""
    INTEGER: gl.constexpr = bits_of(vector.dtype.element_ty)[0]
    half = vector.to(gl.pointer_type(INTEGER)) + (1 - parity) * size
    gl.store(half + place, gl.full_like(place, MISSING).to(INTEGER), mask=exists)


@gluon.jit
def store_relaxed(pointers, bits, exists):
    """Store integers of 16 or 32 bits that other programs poll; `exists` masks them.

    The loads that poll (`received`) are relaxed, and only a relaxed store is ordered with them. Cleared places need
    none: no program reads them before a fence.
    """
    SIZE: gl.constexpr = bits.dtype.primitive_bitwidth
    CODE: gl.constexpr = (
        """{ .reg .pred exists; .reg .b16 half;
        cvt.u16.u32 half, $2;
        setp.ne.u32 exists, $3, 0;
        @exists st.relaxed.gpu.global.b"""
        + ("16 [$1], half;" if SIZE == 16 else "32 [$1], $2;")
        + """
        mov.u32 $0, 0; }"""
    )
    wide = bits.to(gl.int32)
    gl.inline_asm_elementwise(
        CODE,
        "=r,l,r,r",
        [pointers.to(gl.int64), wide, gl.where(exists, gl.full_like(wide, 1), 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def received(values, pointers, PACK: gl.constexpr, c):
    """Reload published numbers that had not arrived yet; each thread reloads its own.

    Args:
        values: as loaded, with at least `PACK` adjacent ones in each thread.
        pointers: their addresses.
        PACK: 2 or 4.
        c: constants.
    """
    if not c.EARLY:
        return values
    CHECK: gl.constexpr = """
        not.b32 t, $0; sub.u32 t, t, 0x00010001; and.b32 t, t, $0;"""
    TWO: gl.constexpr = (
        """{ .reg .pred there; .reg .b32 t;
        mov.b32 $0, $1;
        again:"""
        + CHECK
        + """
        and.b32 t, t, 0x80008000;
        setp.eq.u32 there, t, 0;
        @there bra done;
        ld.relaxed.gpu.global.b32 $0, [$2];
        bra again;
        done: }"""
    )
    FOUR: gl.constexpr = (
        """{ .reg .pred there; .reg .b32 t, u;
        mov.b32 $0, $2;
        mov.b32 $1, $3;
        again:"""
        + CHECK
        + """
        not.b32 u, $1; sub.u32 u, u, 0x00010001; and.b32 u, u, $1;
        or.b32 t, t, u;
        and.b32 t, t, 0x80008000;
        setp.eq.u32 there, t, 0;
        @there bra done;
        ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$4];
        bra again;
        done: }"""
    )
    bits = gl.inline_asm_elementwise(
        FOUR if PACK == 4 else TWO,
        "=&r,=&r,r,r,l,l,l,l" if PACK == 4 else "=&r,r,l,l",
        [values.to(gl.int16, bitcast=True), pointers.to(gl.int64)],
        dtype=gl.int16,
        is_pure=False,
        pack=PACK,
    )
    return bits.to(values.dtype, bitcast=True)


@gluon.jit
def received_log(values, pointers, c):
    """Like `received`, for float32."""
    if not c.EARLY:
        return values
    CODE: gl.constexpr = """{ .reg .pred there;
        mov.b32 $0, $1;
        again: setp.ne.u32 there, $0, 0xFFFFFFFF;
        @there bra done;
        ld.relaxed.gpu.global.b32 $0, [$2];
        bra again;
        done: }"""
    bits = gl.inline_asm_elementwise(
        CODE,
        "=&r,r,l",
        [values.to(gl.int32, bitcast=True), pointers.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return bits.to(values.dtype, bitcast=True)


@gluon.jit
def arrive_published(counter, c):
    """Arrive at a counter; with EARLY, possibly before this program's published numbers are visible."""
    count_in(counter, gl.constexpr("relaxed" if c.EARLY else "release"))


@gluon.jit
def arrive_grid(counter):
    """Arrive at a counter when everything that this program's consumers have written is visible."""
    count_in(counter, gl.constexpr("release"))


@gluon.jit
def count_in(counter, ORDER: gl.constexpr):
    """Add 1 to a counter when all consumer threads have come here; ORDER is a memory order of PTX."""
    gl.thread_barrier()
    CODE: gl.constexpr = (
        """{ .reg .pred first; .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 32;
        @first red."""
        + ORDER
        + """.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0; }"""
    )
    gl.inline_asm_elementwise(
        CODE, "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_grid(counter, arrivals, FENCE: gl.constexpr):
    """Wait until a counter has `arrivals` since the launch; later loads must bypass the first-level cache.

    One thread polls: more would delay the arrivals of other programs. With FENCE, the arriving thread executes a fence
    meanwhile: the program's next arrival then covers all that it has written before, such as cleared places.
    """
    CODE: gl.constexpr = (
        """{ .reg .pred not_first, early, arriving; .reg .u32 thread, seen;
        mov.u32 $0, 0;
        mov.u32 thread, %tid.x;
        """
        + ("setp.eq.u32 arriving, thread, 32; @arriving fence.acq_rel.gpu;" if FENCE else "")
        + """
        setp.ne.u32 not_first, thread, 0;
        @not_first bra done;
        again:
        ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.u32 early, seen, $2;
        @early bra again;
        done: }"""
    )
    gl.inline_asm_elementwise(
        CODE, "=&r,l,r", [counter.to(gl.int64), arrivals], dtype=gl.int32, is_pure=False, pack=1
    )
    gl.thread_barrier()


@gluon.jit
def reset_counters(counter, base, c):
    """Prepare the counters for the next step, when no program waits for them any more; `base` is this step's parity."""
    gl.store(counter + PARITY, (base + c.LAYERS) & 1)
    gl.store(counter + HEADS_DONE, 0)
    gl.store(counter + HEADS_MIXED, 0)
    for i in gl.static_range(c.KV_HEADS):
        gl.store(counter + HEAD_READY + i * COUNTER_LINE, 0)
    gl.store(counter, 0)
