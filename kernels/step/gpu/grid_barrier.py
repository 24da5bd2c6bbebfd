"""How the programs of the whole-step kernel meet: what one computes and all need, and the barrier of the grid.

Where programs meet early, a number that crosses says by itself whether it is there: its place holds `MISSING` until
then, and who finds that asks again. So a program need not wait until its numbers can be seen before it is counted in,
which takes as long as the barrier itself; the barrier only has readers ask when there is nearly always an answer.

    layer n        writes half t of a vector, empties half 1 - t, which layer n - 1 wrote and nobody reads any more
    layer n + 1    writes half 1 - t ...

Emptied places are seen by all before they are filled: between the two every program has been counted in behind a
fence. Knows nothing of what is computed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COUNTER_LINE = gl.constexpr(32)
"""Numbers from one counter to the next: a line of the cache for each."""
TURN = gl.constexpr(1)
"""Where among the counters it stands which half of the vectors the next step begins with."""
HEADS_DONE = gl.constexpr(32)
"""Where the arrivals of those that attend are counted."""
HEAD_READY = gl.constexpr(64)
"""Where those of the programs of the first key-value head are counted; the others' follow."""
MISSING = gl.constexpr(-1)
"""Bits of a number that is not there yet: a NaN that no conversion makes."""


@gluon.jit
def publish(vector, size, turn, place, values, c):
    """Write numbers of this program to one half of a vector, [2, size], and empty their places in the other."""
    dtype: gl.constexpr = vector.dtype.element_ty
    bits = values.to(dtype).to(gl.int16, bitcast=True)
    there = gl.where(bits == MISSING, 0x7FFF, bits.to(gl.int32)).to(gl.int16)
    half = vector.to(gl.pointer_type(gl.int16))
    gl.store(half + turn * size + place, there)
    if c.EARLY:
        gl.store(half + (1 - turn) * size + place, gl.full_like(there, MISSING))


@gluon.jit
def received(values, pointers, PACK: gl.constexpr, c):
    """Ask again for those published numbers that were not there yet, each thread for its own.

    Args:
        values: as they were loaded, with at least `PACK` beside each other in each thread.
        pointers: where.
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
    """Count this program in; where it may, before what it has published can be seen."""
    count_in(counter, gl.constexpr("relaxed" if c.EARLY else "release"))


@gluon.jit
def arrive_grid(counter):
    """Count this program in, when all that its consumers have written can be seen."""
    count_in(counter, gl.constexpr("release"))


@gluon.jit
def count_in(counter, ORDER: gl.constexpr):
    """Count this program in, when its consumers have come here, in PTX's order of memory."""
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
    """Let this program's next arrival stand for all that it wrote before its last one, such as emptied places."""
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
    """Wait for so many arrivals since the launch; what is loaded then must pass the first-level cache by.

    One thread asks: more would delay the others' arrivals.
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
