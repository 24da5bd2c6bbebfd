"""Shared by producer and consumers of the whole-step kernel: constants, the shared-memory ring, each program's rows.

A stage of the ring holds `PARTS` parts of 8 rows by 256 columns of weights, or keys and values that have the same size
in the model's dtype. FP8 keys and values fill half a stage, and their scales follow them. A stage has two barriers:
`full` completes when its bytes have arrived, `empty` when they have been read. Producer and consumers each count the
stages they have used; the count gives stage and phase:

    use n of a ring of S stages    stage n % S, phase (n // S) & 1
"""
# An aggregate reads its annotations when its class is created, so they cannot be postponed to strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(8)
"""Rows of weights in a part: one for each consumer warp."""
COLUMNS = gl.constexpr(256)
"""Columns of weights in a part: 16 bytes for each thread of a warp."""
MOST_PROGRAMS = gl.constexpr(256)
MOST_SPLITS = gl.constexpr(8)
"""Splits of a sequence, at most: to merge them, a program holds all their attention results in registers."""
PRODUCER_WARPS = gl.constexpr(4)
CONSUMER_WARPS = gl.constexpr(8)

FIELDS = (
    "qkv", "output", "gate_up", "down", "input_norm", "mlp_norm", "q_norm", "k_norm", "qkv_bias", "keys", "values",
    "key_scales", "value_scales",
)  # fmt: skip
"""Fields of a layer in the table of addresses, in order."""
(
    QKV,
    OUTPUT,
    GATE_UP,
    DOWN,
    INPUT_NORM,
    MLP_NORM,
    Q_NORM,
    K_NORM,
    QKV_BIAS,
    KEYS,
    VALUES,
    KEY_SCALES,
    VALUE_SCALES,
) = (gl.constexpr(i) for i in range(len(FIELDS)))
_NUM_FIELDS = gl.constexpr(len(FIELDS))


@aggregate
class StepConstants:
    """Compile-time constants of the kernel.

    Attributes:
        LAYERS: layers of the model; `HIDDEN`, `INNER`, `HEADS`, `KV_HEADS`, `D` and `VOCAB` are its sizes.
        GROUP: query heads per key-value head.
        BLOCK_SIZE: tokens per block of the cache.
        PARTS: parts per stage.
        STAGES: stages of the ring.
        FLYING: stages that a program copies at once. More would delay the loads of the consumers.
        HEAD_FLYING: the same for the output head, during which the consumers issue no loads.
        EARLY: whether a program arrives at a barrier before its results are visible (`kernels.step.gpu.grid_barrier`).
        SPLITS: parts of a sequence that are attended in parallel, at most.
        NORMS: whether queries and keys are normalized per head.
        BIAS: whether the QKV projection has a bias.
        FP8: whether the cache is in float8_e4m3fn, with a scale for each key and each value of a head.
        OWN: tiles of ROWS elements of the hidden state that a program computes, at most.
        KEYS: keys per stage; values likewise.
        HEAD_ROWS: query heads per key-value head plus 2, for key and value, rounded up to a power of two.
        W: register layout of a part [ROWS, COLUMNS]: one row per warp.
        A: register layout of keys [8, KEYS / 8, D]: one index of the first dimension per warp.
    """

    LAYERS: gl.constexpr
    HIDDEN: gl.constexpr
    INNER: gl.constexpr
    HEADS: gl.constexpr
    KV_HEADS: gl.constexpr
    GROUP: gl.constexpr
    D: gl.constexpr
    VOCAB: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    PARTS: gl.constexpr
    STAGES: gl.constexpr
    FLYING: gl.constexpr
    HEAD_FLYING: gl.constexpr
    EARLY: gl.constexpr
    SPLITS: gl.constexpr
    NORMS: gl.constexpr
    BIAS: gl.constexpr
    FP8: gl.constexpr
    OWN: gl.constexpr
    KEYS: gl.constexpr
    HEAD_ROWS: gl.constexpr
    W: gl.constexpr
    A: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, D, VOCAB, BLOCK_SIZE, PARTS, STAGES, FLYING, HEAD_FLYING,
        EARLY, SPLITS, NORMS, BIAS, FP8, OWN,
    ) -> None:  # fmt: skip
        self.LAYERS = gl.constexpr(LAYERS)
        self.HIDDEN = gl.constexpr(HIDDEN)
        self.INNER = gl.constexpr(INNER)
        self.HEADS = gl.constexpr(HEADS)
        self.KV_HEADS = gl.constexpr(KV_HEADS)
        self.GROUP = gl.constexpr(HEADS // KV_HEADS)
        self.D = gl.constexpr(D)
        self.VOCAB = gl.constexpr(VOCAB)
        self.BLOCK_SIZE = gl.constexpr(BLOCK_SIZE)
        self.PARTS = gl.constexpr(PARTS)
        self.STAGES = gl.constexpr(STAGES)
        self.FLYING = gl.constexpr(FLYING)
        self.HEAD_FLYING = gl.constexpr(HEAD_FLYING)
        self.EARLY = gl.constexpr(EARLY)
        self.SPLITS = gl.constexpr(SPLITS)
        self.NORMS = gl.constexpr(NORMS)
        self.BIAS = gl.constexpr(BIAS)
        self.FP8 = gl.constexpr(FP8)
        self.OWN = gl.constexpr(OWN)
        self.KEYS = gl.constexpr(PARTS * ROWS.value * COLUMNS.value // 2 // D)
        self.HEAD_ROWS = gl.constexpr(1 << (HEADS // KV_HEADS + 1).bit_length())
        self.W = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
        lanes = D // 8
        keys = max(1, self.KEYS.value // 8 // (32 // lanes))
        self.A = gl.constexpr(
            gl.BlockedLayout([1, keys, 8], [1, 32 // lanes, lanes], [8, 1, 1], [2, 1, 0])
        )


@aggregate
class Ring:
    """The kernel's shared memory and its barriers.

    Attributes:
        data: [STAGES, PARTS * ROWS * COLUMNS].
        full: [STAGES, 1], as is `empty`.
        x: [inputs / 256, 256], the input of a linear layer.
        heads: [HEAD_ROWS, D], queries, key and value of the step's token.
        accs: [GROUP, 8, D] float32, each warp's partial attention output.
        sums: [2 * GROUP, 8] float32, each warp's maximum and total.
    """

    data: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    x: gl.shared_memory_descriptor
    heads: gl.shared_memory_descriptor
    accs: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, data, full, empty, x, heads, accs, sums) -> None:
        self.data = data
        self.full = full
        self.empty = empty
        self.x = x
        self.heads = heads
        self.accs = accs
        self.sums = sums


@gluon.jit
def make_ring(dtype: gl.constexpr, INPUTS: gl.constexpr, c):
    """Allocate the ring and set up its barriers."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    data = gl.allocate_shared_memory(dtype, [c.STAGES, c.PARTS * ROWS * COLUMNS], flat)
    x = gl.allocate_shared_memory(dtype, [INPUTS // COLUMNS, COLUMNS], flat)
    plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    heads = gl.allocate_shared_memory(dtype, [c.HEAD_ROWS, c.D], flat)
    accs = gl.allocate_shared_memory(gl.float32, [c.GROUP, 8, c.D], plane)
    sums = gl.allocate_shared_memory(gl.float32, [2 * c.GROUP, 8], flat)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [c.STAGES, 1], bar)
    for i in gl.static_range(c.STAGES):
        # Each producer thread arrives when its own copies are complete.
        mbarrier.init(full.index(i), count=PRODUCER_WARPS * 32)
        mbarrier.init(empty.index(i), count=1)
    gl.thread_barrier()
    return Ring(data, full, empty, x, heads, accs, sums)


@gluon.jit
def parts_of(ring, stage, c):
    """View a stage as parts of weights, [PARTS, ROWS, COLUMNS]."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return ring.data.index(stage)._reinterpret(ring.data.dtype, [c.PARTS, ROWS, COLUMNS], layout)


@gluon.constexpr_function
def cache_dtype(dtype, fp8):
    """Return the dtype of the cache of a model in `dtype`."""
    return gl.float8e4nv if fp8 else dtype


@gluon.jit
def keys_of(ring, stage, c):
    """View a stage as keys and values, [2, KEYS, D]; in FP8 as [4, KEYS, D], where the scales follow the values."""
    dtype: gl.constexpr = cache_dtype(ring.data.dtype, c.FP8)
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return ring.data.index(stage)._reinterpret(dtype, [4 if c.FP8 else 2, c.KEYS, c.D], layout)


@gluon.jit
def warps_keys_of(ring, stage, c):
    """View a stage as the keys and values of each warp, [2, 8, KEYS / 8, D]; in FP8 the first size is 4."""
    dtype: gl.constexpr = cache_dtype(ring.data.dtype, c.FP8)
    shape: gl.constexpr = [4 if c.FP8 else 2, 8, c.KEYS // 8, c.D]
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return ring.data.index(stage)._reinterpret(dtype, shape, layout)


@gluon.jit
def scales_of(ring, stage, OF_VALUES: gl.constexpr, c):
    """View the scales of a stage's keys or values, [KEYS] float32; a stage has the size of D such rows."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lines = ring.data.index(stage)._reinterpret(gl.float32, [c.D, c.KEYS], layout)
    return lines.index(c.D // 2 + OF_VALUES)


@gluon.jit
def warps_scales(ring, stage, OF_VALUES: gl.constexpr, layout: gl.constexpr, c):
    """Load the scales of each warp's keys or values, [8, KEYS / 8] float32; all 1 without FP8."""
    scales = gl.full([8, c.KEYS // 8], 1.0, gl.float32, layout=layout)
    if c.FP8:
        plane: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        line = scales_of(ring, stage, OF_VALUES, c)
        scales = line._reinterpret(gl.float32, [8, c.KEYS // 8], plane).load(layout)
    return scales


@gluon.jit
def wait_full(ring, used, c):
    """Wait until the bytes of use number `used` have arrived; returns the stage."""
    stage = used % c.STAGES
    mbarrier.wait(ring.full.index(stage), (used // c.STAGES) & 1)
    return stage


@gluon.jit
def release(ring, used, COUNT: gl.constexpr, c):
    """Release COUNT stages from use number `used` on, when all consumers have read them."""
    gl.thread_barrier()
    for i in gl.static_range(COUNT):
        mbarrier.arrive(ring.empty.index((used + i) % c.STAGES), count=1)


@gluon.jit
def wait_empty(ring, used, c):
    """Wait until the stage of use number `used` is free; returns the stage."""
    stage = used % c.STAGES
    mbarrier.wait(ring.empty.index(stage), ((used // c.STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def sent(ring, stage, FLYING: gl.constexpr):
    """Arrive at the stage's `full` barrier when this thread's copies are done; wait until FLYING - 1 are pending."""
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(FLYING - 1)


@gluon.jit
def address(table, layer, FIELD: gl.constexpr, dtype: gl.constexpr):
    """Look up the address of a tensor of a layer."""
    place = gl.load(table + layer * _NUM_FIELDS + FIELD)
    return place.to(gl.pointer_type(dtype))


@gluon.jit
def cache_of(table, layer, dtype: gl.constexpr, c):
    """Look up the addresses of a layer's cache, for a model in `dtype`: (keys, scales), (values, scales)."""
    numbers: gl.constexpr = cache_dtype(dtype, c.FP8)
    keys = address(table, layer, KEYS, numbers), address(table, layer, KEY_SCALES, gl.float32)
    values = address(table, layer, VALUES, numbers), address(table, layer, VALUE_SCALES, gl.float32)
    return keys, values


@gluon.jit
def key_range(past, split, c):
    """Return the stages of keys that a split attends.

    Returns:
        (number of splits, first stage, last stage + 1); the range is empty for a split past the last one.
    """
    stages = (past + c.KEYS - 1) // c.KEYS
    splits = gl.minimum(gl.maximum(stages, 1), c.SPLITS)
    each = gl.maximum((stages + splits - 1) // splits, 1)
    splits = gl.maximum((stages + each - 1) // each, 1)
    return splits, gl.minimum(split * each, stages), gl.minimum((split + 1) * each, stages)


@gluon.jit
def members_of_head(kv_head, c):
    """Return how many programs compute the queries, keys and values of a key-value head."""
    return (gl.num_programs(0) - kv_head + c.KV_HEADS - 1) // c.KV_HEADS


@gluon.jit
def projected_row(number, c):
    """Return the first row of this program's tile `number` of the QKV projection."""
    QUERIES: gl.constexpr = c.GROUP * c.D
    kv_head = gl.program_id(0) % c.KV_HEADS
    tile = gl.program_id(0) // c.KV_HEADS + number * members_of_head(kv_head, c)
    row = tile * ROWS
    key_row = (c.HEADS + kv_head) * c.D + row - QUERIES
    value_row = key_row + (c.KV_HEADS - 1) * c.D
    behind = gl.where(row < QUERIES + c.D, key_row, value_row)
    return gl.where(row < QUERIES, kv_head * QUERIES + row, behind)


@gluon.jit
def projected_tiles(c):
    """Return how many tiles of the QKV projection this program computes."""
    TILES: gl.constexpr = (c.GROUP + 2) * c.D // ROWS
    members = members_of_head(gl.program_id(0) % c.KV_HEADS, c)
    return (TILES - gl.program_id(0) // c.KV_HEADS + members - 1) // members
