"""One-shot all-reduce in Triton: each GPU reads the parts of all GPUs over NVLink and adds them in the order of ranks.

A program handles some elements, for which each rank has slots of shared memory, twice:

    write       its own part to its slots
    announce    the number of this launch, to all other ranks
    wait        until all others have announced it
    read        the slots of all ranks

Launches alternate between the two halves of the slots. A rank that writes a half again has seen the announcement of
the launch between, which the other ranks made after they had read that half; so no announcement says that a rank has
read. The numbers of launches are counted on the GPU, for each program, so that a recording can be replayed.

The order of all ranks' launches must be the same, and all programs of a launch must fit on the GPU at once: a program
waits for the same program of the other ranks. Launches that use the same memory divide it among programs in the same
way, so that a program's slots are its own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = tl.constexpr(2048)
"""Elements of a program of `sum_ranks`."""
VECTOR = tl.constexpr(8)
"""Elements that a thread copies at once."""


@triton.jit
def _address(place, TYPE: tl.constexpr):
    """Load an address, which is a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(place).to(TYPE), 16)


@triton.jit
def _sum(
    own, place, exists, memory, flags, launches,
    SLOT: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Return the sum over all ranks in their order, float32; every program of the launch calls it once.

    Args:
        own: this rank's part, the elements of this program.
        place: of each of them in a half of the slots.
        exists: which of them exist.
        memory: [SIZE] int64, addresses of the slots of each rank, [2, HALF] in the dtype of `own`.
        flags: [SIZE] int64, addresses of the flags of each rank, int32 [programs, SIZE].
        launches: [programs] int32, launches so far.
        SLOT: the type of a pointer to an element.
    """
    program = tl.program_id(0)
    number = tl.load(launches + program) + 1
    slots = place + (number & 1) * HALF
    tl.store(_address(memory + RANK, SLOT) + slots, own, mask=exists)
    # All threads have written before one of them announces it.
    tl.debug_barrier()
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            theirs = _address(flags + rank, launches.dtype)
            tl.atomic_xchg(theirs + program * SIZE + RANK, number, sem="release", scope="sys")
    mine = _address(flags + RANK, launches.dtype) + program * SIZE
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            announced = tl.atomic_add(mine + rank, 0, sem="acquire", scope="sys")
            # The difference stays right when the numbers overflow.
            while announced - number < 0:
                announced = tl.atomic_add(mine + rank, 0, sem="acquire", scope="sys")
    total = tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            # Not from the first-level cache, which is not coherent with writes of other GPUs.
            theirs = _address(memory + rank, SLOT) + slots
            part = tl.load(theirs, mask=exists, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
    tl.store(launches + program, number)
    return total


@triton.jit(do_not_specialize=["num_vectors"])
def sum_ranks(
    x, out, memory, flags, launches, num_vectors,
    RANK: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Add the tensors of all ranks in their order; program (elements).

    Args:
        x: [num_vectors * VECTOR], this rank's part.
        out: float32, like `x`.
        memory: see `_sum`, like `flags` and `launches`.
        flags: see `_sum`.
        launches: see `_sum`.
        num_vectors: of `x`.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = place < num_vectors * VECTOR
    own = tl.load(x + place, mask=exists, other=0.0)
    total = _sum(own, place, exists, memory, flags, launches, x.dtype, RANK, SIZE, HALF)
    tl.store(out + place, total, mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def sum_ranks_and_normalize(
    x, parts, weight, out, memory, flags, launches, x_stride, num_rows, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of all ranks to the residual stream in place and compute its RMS norm; program (row).

    A rank's SPLITS partial sums are added first and rounded to the dtype of `x`. The result is that of `sum_ranks` for
    the rounded sums, followed by `kernels.norms.gpu.norm_and_gate.add_norm`.

    Args:
        x: [num_rows, C], with rows `x_stride` apart; written.
        parts: [SPLITS, num_rows, C], this rank's partial sums.
        weight: [C], of the norm.
        out: [num_rows, C].
        memory: see `_sum`, like `flags` and `launches`.
        flags: see `_sum`.
        launches: see `_sum`.
        x_stride: a multiple of VECTOR.
        num_rows: T.
        eps: added to the mean square.
    """
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    exists = column < C
    if PDL:
        gdc_launch_dependents()
    factor = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    own = tl.zeros((WIDTH,), tl.float32)
    for i in tl.static_range(SPLITS):
        part = tl.load(parts + (i * num_rows + row) * C + column, mask=exists, other=0.0)
        own += part.to(tl.float32)
    place = x + row.to(tl.int64) * x_stride + column
    hidden = tl.load(place, mask=exists, other=0.0)
    own = own.to(hidden.dtype)
    total = _sum(own, row * C + column, exists, memory, flags, launches, x.dtype, RANK, SIZE, HALF)
    hidden = (hidden.to(tl.float32) + total).to(hidden.dtype)
    tl.store(place, hidden, mask=exists)
    values = hidden.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / C + eps)
    tl.store(
        out + row * C + column, (values * scale * factor).to(out.dtype.element_ty), mask=exists
    )
