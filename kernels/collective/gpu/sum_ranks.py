"""One-shot all-reduce in Triton: each GPU reads the parts of all GPUs over NVLink and adds them in the order of ranks.

A program handles BLOCK elements, for which each rank has a slot of shared memory, twice:

    write       its own part to its slot
    announce    the number of this launch, to all other ranks
    wait        until all others have announced it
    read        the slots of all ranks

Launches alternate between the two halves of the slots. A rank that writes a half again has seen the announcement of
the launch between, which the other ranks made after they had read that half; so no announcement says that a rank has
read. The numbers of launches are counted on the GPU, for each program, so that a recording can be replayed.

The order of all ranks' launches must be the same, and all programs of a launch must fit on the GPU at once: a program
waits for the same program of the other ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(2048)
"""Elements of a program."""
VECTOR = tl.constexpr(8)
"""Elements that a thread copies at once."""


@triton.jit
def _address(place, TYPE: tl.constexpr):
    """Load an address, which is a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(place).to(TYPE), 16)


@triton.jit(do_not_specialize=["num_vectors"])
def sum_ranks(
    x, out, memory, flags, launches, num_vectors,
    RANK: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Add the tensors of all ranks in their order; program (elements).

    Args:
        x: [num_vectors * VECTOR], this rank's part.
        out: float32, like `x`.
        memory: [SIZE] int64, addresses of the slots of each rank, [2, HALF] in the dtype of `x`.
        flags: [SIZE] int64, addresses of the flags of each rank, int32 [programs, SIZE].
        launches: [programs] int32, launches so far.
    """
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    exists = place < num_vectors * VECTOR
    number = tl.load(launches + program) + 1
    slots = place + (number & 1) * HALF
    own = tl.load(x + place, mask=exists, other=0.0)
    tl.store(_address(memory + RANK, x.dtype) + slots, own, mask=exists)
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
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            # Not from the first-level cache, which is not coherent with writes of other GPUs.
            theirs = _address(memory + rank, x.dtype) + slots
            part = tl.load(theirs, mask=exists, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
    tl.store(out + place, total, mask=exists)
    tl.store(launches + program, number)
