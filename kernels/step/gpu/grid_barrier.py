"""Communication between the programs of the whole-step kernel: published vectors and the grid barrier.

With EARLY, a published number shows by itself whether it has arrived: its place holds `MISSING` until then, and a
reader that finds `MISSING` loads again. A program therefore arrives at the barrier without waiting until its numbers
are visible, which takes as long as the barrier itself. The barrier only delays readers until the first load nearly
always succeeds.

    layer n        writes half t of a vector, clears half 1 - t, which layer n - 1 wrote and no program reads any more
    layer n + 1    writes half 1 - t ...

A cleared place is visible to all programs before it is written again: in between, every program has arrived behind a
fence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COUNTER_LINE = gl.constexpr(32)
"""Elements from one counter to the next: each counter has its own cache line."""
PARITY = gl.constexpr(1)
"""Index among the counters of the half of the vectors that the next step begins with."""
HEADS_DONE = gl.constexpr(32)
"""Index of the counter of programs that have attended."""
HEAD_READY = gl.constexpr(64)
"""Index of the counter of programs that have projected the first key-value head; those of other heads follow."""
MISSING = gl.constexpr(-1)
"""Bits of a number that has not arrived: a NaN that no conversion produces."""


@gluon.jit
def publish(vector, size, parity, place, values, c):
    """Write this program's numbers to half `parity` of a vector [2, size], and clear their places in the other half."""
    dtype: gl.constexpr = vector.dtype.element_ty
    bits = values.to(dtype).to(gl.int16, bitcast=True)
    there = gl.where(bits == MISSING, 0x7FFF, bits.to(gl.int32)).to(gl.int16)
    half = vector.to(gl.pointer_type(gl.int16))
    gl.store(half + parity * size + place, there)
    if c.EARLY:
        gl.store(half + (1 - parity) * size + place, gl.full_like(there, MISSING))


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
        setp.eq.u32 first, thread, 0;
        @first red."""
        + ORDER
        + """.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0; }"""
    )
    gl.inline_asm_elementwise(
        CODE, "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence():
    """Make this program's next arrival cover all that it wrote before its last one, such as cleared places."""
    gl.inline_asm_elementwise(
        """{ .reg .pred first; .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first fence.acq_rel.gpu;
        mov.u32 $0, $1; }""",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_grid(counter, arrivals):
    """Wait until a counter has `arrivals` since the launch; later loads must bypass the first-level cache.

    One thread polls: more would delay the arrivals of other programs.
    """
    gl.inline_asm_elementwise(
        """{ .reg .pred first, early; .reg .u32 thread, seen;
        mov.u32 $0, 0;
        mov.u32 thread, %tid.x;
        setp.ne.u32 first, thread, 0;
        @first bra done;
        again:
        ld.acquire.gpu.global.u32 seen, [$1];
        setp.lt.u32 early, seen, $2;
        @early bra again;
        done: }""",
        "=&r,l,r",
        [counter.to(gl.int64), arrivals],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()
