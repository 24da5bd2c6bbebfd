"""What the roles of the whole-step kernel derive from the model's shape and the launch.

Constants, the sizes of rows of weights in stages, the table of addresses, and each program's share of the work.
"""
# An aggregate reads its annotations when its class is created, so they cannot be postponed to strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from kernels.step import sizes

ROWS = gl.constexpr(sizes.ROWS)
COLUMNS = gl.constexpr(sizes.COLUMNS)
PARTS = gl.constexpr(sizes.PARTS)
LEAST_STAGES = gl.constexpr(sizes.LEAST_STAGES)
MOST_HELD = gl.constexpr(sizes.MOST_HELD)
MOST_TILES = gl.constexpr(sizes.MOST_TILES)
SUMS = gl.constexpr(sizes.SUMS)
MOST_TENSOR_TILES = gl.constexpr(sizes.MOST_TENSOR_TILES)
WARP_SUMS = gl.constexpr(sizes.WARP_SUMS)
MIXED = gl.constexpr(256)
"""Elements of attention that a program merges at once, in a step of several rows."""
MOST_PROGRAMS = gl.constexpr(256)
INT4 = gl.constexpr(2)
"""Value of FP8_WEIGHTS, and of the arguments FP8 of products, for 4-bit weights."""
PRODUCER_WARPS = gl.constexpr(4)
CONSUMER_WARPS = gl.constexpr(sizes.WARPS)
FIELDS = (
    "qkv", "output", "gate_up", "down", "input_norm", "mlp_norm", "q_norm", "k_norm", "qkv_bias", "keys", "values",
    "key_scales", "value_scales", "window",
)  # fmt: skip
"""Fields of a layer in the table of addresses, in order; `window` is not an address but a number of tokens.

Layers with more tensors have a second row behind the rows of all layers, so that the rows of others stay as short: the
scales of FP8 weights are in the fields of their matrices, the norms after attention and MLP in the fields of the norms
before them.
"""
(
    QKV, OUTPUT, GATE_UP, DOWN, INPUT_NORM, MLP_NORM, Q_NORM, K_NORM, QKV_BIAS, KEYS, VALUES, KEY_SCALES,
    VALUE_SCALES, WINDOW,
) = (gl.constexpr(i) for i in range(len(FIELDS)))  # fmt: skip
_NUM_FIELDS = gl.constexpr(len(FIELDS))


@aggregate
class StepConstants:
    """Compile-time constants of the kernel.

    Attributes:
        BATCH: rows of the step, each a token of a sequence.
        OF_ROWS: whether the step is computed as one of several rows is (`kernels.step.gpu.kernel_rows`), with the same
            bits for a row whatever BATCH is.
        LAYERS: layers of the model; `HIDDEN`, `INNER`, `HEADS`, `KV_HEADS`, `D` and `VOCAB` are its sizes.
        GROUP: query heads per key-value head.
        GROUP_SPLITS: programs that attend the same keys, each for other query heads.
        UNITS: key-value heads of all rows times `GROUP_SPLITS`.
        HELD: query heads that a program attends.
        BLOCK_SIZE: tokens per block of the cache.
        STAGES: stages of the ring.
        FLYING: stages that a program copies at once. More would delay the loads of the consumers.
        HEAD_FLYING: the same for the output head, during which the consumers issue no loads.
        EARLY: whether a program arrives at a barrier before its results are visible (`kernels.step.gpu.grid_barrier`).
        SPLITS: parts in which the keys of a row are attended, at most; a power of two that does not depend on BATCH.
        LOCAL: splits of a row that a program attends, one after the other; one in a step of one row.
        SPLIT_GROUPS: groups of LOCAL splits of a row, each of one program.
        NORMS: whether queries and keys are normalized per head.
        BIAS: whether the QKV projection has a bias.
        WINDOWS: whether a layer has a sliding window.
        FP8: whether the cache is in float8_e4m3fn, with a scale for each key and each value of a head.
        FP8_WEIGHTS: whether the layers' matrices are in float8_e4m3fn, with a scale for each row or, with PART_SCALES,
            for groups; INT4 if they are of 4 bits in groups. A stage holds as many bytes of these, so its parts have
            2 * COLUMNS columns.
        PART_SCALES: scales of a row in a part of weights in groups, each in an int32, with its shift where there are
            some; 0 of other weights.
        WEIGHT_OFFSET: subtracted from 4-bit numbers.
        WEIGHT_SHIFTS: whether 4-bit weights have shifts.
        HIDDEN_TILES: tiles of ROWS elements of the hidden state that a program computes, at most.
        POST_NORMS: whether the outputs of attention and MLP are normalized before they are added to the residual stream
            (`kernels.step.gpu.vectors`).
        GELU_TANH: whether the MLP's activation is GELU, approximated by a hyperbolic tangent, instead of SiLU.
        LOCAL_ROPE: whether layers with a sliding window have another rotation.
        EMBEDDING_FACTOR: factor on the embedding.
        KEYS: keys per stage; values likewise.
        HELD_P: `HELD` rounded up to a power of two.
        HEAD_ROWS: rows of the buffer of query heads and of the keys and the values of the step's tokens.
        HEADS_IN_SUMS: whether that buffer lies in the memory of the sums, which attention does not need.
        CHUNK: elements of shared memory for 1024 columns of all rows.
        INPUTS: elements of the largest vectors of all rows in shared memory.
        DP: `D` rounded up to a power of two. A head is two halves of DP / 2 elements, each padded (`head_element`).
        BLOCK_D: largest power of two that divides `D`.
        W: register layout of a part [ROWS, COLUMNS]: one row per warp.
        LINES: rows of lanes, each of which attends 2 keys of a stage. A lane has 8 elements of a head.
        A: register layout of keys [LINES, 2, DP].
        M: register layout of partial results [HELD_P, LINES, DP]: a thread has all lines.
    """

    BATCH: gl.constexpr
    OF_ROWS: gl.constexpr
    LAYERS: gl.constexpr
    HIDDEN: gl.constexpr
    INNER: gl.constexpr
    HEADS: gl.constexpr
    KV_HEADS: gl.constexpr
    GROUP: gl.constexpr
    GROUP_SPLITS: gl.constexpr
    UNITS: gl.constexpr
    HELD: gl.constexpr
    D: gl.constexpr
    VOCAB: gl.constexpr
    BLOCK_SIZE: gl.constexpr
    STAGES: gl.constexpr
    FLYING: gl.constexpr
    HEAD_FLYING: gl.constexpr
    EARLY: gl.constexpr
    SPLITS: gl.constexpr
    LOCAL: gl.constexpr
    SPLIT_GROUPS: gl.constexpr
    NORMS: gl.constexpr
    BIAS: gl.constexpr
    WINDOWS: gl.constexpr
    FP8: gl.constexpr
    FP8_WEIGHTS: gl.constexpr
    HIDDEN_TILES: gl.constexpr
    POST_NORMS: gl.constexpr
    GELU_TANH: gl.constexpr
    LOCAL_ROPE: gl.constexpr
    EMBEDDING_FACTOR: gl.constexpr
    PART_SCALES: gl.constexpr
    WEIGHT_OFFSET: gl.constexpr
    WEIGHT_SHIFTS: gl.constexpr
    KEYS: gl.constexpr
    HEAD_ROWS: gl.constexpr
    HELD_P: gl.constexpr
    HEADS_IN_SUMS: gl.constexpr
    CHUNK: gl.constexpr
    INPUTS: gl.constexpr
    DP: gl.constexpr
    BLOCK_D: gl.constexpr
    LINES: gl.constexpr
    W: gl.constexpr
    A: gl.constexpr
    M: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, GROUP_SPLITS, HELD, HELD_P, D, DP, BLOCK_D, INPUTS, VOCAB,
        BLOCK_SIZE, STAGES, FLYING, HEAD_FLYING, EARLY, SPLITS, NORMS, BIAS, WINDOWS, FP8, HIDDEN_TILES, BATCH=1,
        FP8_WEIGHTS=False, POST_NORMS=False, GELU_TANH=False, LOCAL_ROPE=False,
        EMBEDDING_FACTOR=1.0, PART_SCALES=0, WEIGHT_OFFSET=0, WEIGHT_SHIFTS=False, OF_ROWS=False, LOCAL=1,
    ) -> None:  # fmt: skip
        self.BATCH = gl.constexpr(BATCH)
        self.OF_ROWS = gl.constexpr(OF_ROWS)
        self.CHUNK = gl.constexpr(BATCH * PARTS.value * COLUMNS.value)
        self.LAYERS = gl.constexpr(LAYERS)
        self.HIDDEN = gl.constexpr(HIDDEN)
        self.INNER = gl.constexpr(INNER)
        self.HEADS = gl.constexpr(HEADS)
        self.KV_HEADS = gl.constexpr(KV_HEADS)
        self.GROUP = gl.constexpr(HEADS // KV_HEADS)
        self.GROUP_SPLITS = gl.constexpr(GROUP_SPLITS)
        self.UNITS = gl.constexpr(BATCH * KV_HEADS * GROUP_SPLITS)
        self.HELD = gl.constexpr(HELD)
        self.D = gl.constexpr(D)
        self.DP = gl.constexpr(DP)
        self.BLOCK_D = gl.constexpr(BLOCK_D)
        self.INPUTS = gl.constexpr(INPUTS)
        self.VOCAB = gl.constexpr(VOCAB)
        self.BLOCK_SIZE = gl.constexpr(BLOCK_SIZE)
        self.STAGES = gl.constexpr(STAGES)
        self.FLYING = gl.constexpr(FLYING)
        self.HEAD_FLYING = gl.constexpr(HEAD_FLYING)
        self.EARLY = gl.constexpr(EARLY)
        self.SPLITS = gl.constexpr(SPLITS)
        self.LOCAL = gl.constexpr(LOCAL)
        self.SPLIT_GROUPS = gl.constexpr(SPLITS // LOCAL)
        self.NORMS = gl.constexpr(NORMS)
        self.BIAS = gl.constexpr(BIAS)
        self.WINDOWS = gl.constexpr(WINDOWS)
        self.FP8 = gl.constexpr(FP8)
        self.FP8_WEIGHTS = gl.constexpr(FP8_WEIGHTS)
        self.HIDDEN_TILES = gl.constexpr(HIDDEN_TILES)
        self.POST_NORMS = gl.constexpr(POST_NORMS)
        self.GELU_TANH = gl.constexpr(GELU_TANH)
        self.LOCAL_ROPE = gl.constexpr(LOCAL_ROPE)
        self.EMBEDDING_FACTOR = gl.constexpr(EMBEDDING_FACTOR)
        self.PART_SCALES = gl.constexpr(PART_SCALES)
        self.WEIGHT_OFFSET = gl.constexpr(WEIGHT_OFFSET)
        self.WEIGHT_SHIFTS = gl.constexpr(WEIGHT_SHIFTS)
        self.KEYS = gl.constexpr(PARTS.value * ROWS.value * COLUMNS.value // 2 // DP)
        self.HEAD_ROWS = gl.constexpr(max(4, 1 << (HELD + 2 * BATCH - 1).bit_length()))
        sums = MOST_TILES.value * ROWS.value * SUMS.value
        if not OF_ROWS:
            sums = MOST_TENSOR_TILES.value * ROWS.value * WARP_SUMS.value
        self.HEADS_IN_SUMS = gl.constexpr(BATCH > 1 and self.HEAD_ROWS.value * DP * 2 <= sums * 4)
        self.W = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
        lanes = DP // 8
        self.LINES = gl.constexpr(CONSUMER_WARPS.value * 32 // lanes)
        self.A = gl.constexpr(
            gl.BlockedLayout([1, 2, 8], [32 // lanes, 1, lanes], [8, 1, 1], [2, 1, 0])
        )
        self.HELD_P = gl.constexpr(HELD_P)
        each = max(1, DP // (32 * (8 // HELD_P)))
        self.M = gl.constexpr(
            gl.BlockedLayout(
                [1, self.LINES.value, each], [1, 1, 32], [HELD_P, 1, 8 // HELD_P], [2, 1, 0]
            )
        )


@gluon.constexpr_function
def part_columns_log2(fp8):
    """Return the binary logarithm of the weights in 16 bytes."""
    return 4 if fp8 else 3


@gluon.constexpr_function
def stored_dtype(dtype, fp8):
    """Return the dtype of the cache or the weights of a model in `dtype`, if they are in FP8 or not."""
    if fp8 == INT4.value:
        return gl.uint8
    return gl.float8e4nv if fp8 else dtype


@gluon.jit
def address(table, layer, FIELD: gl.constexpr, dtype: gl.constexpr):
    """Look up the address of a tensor of a layer."""
    place = gl.load(table + layer * _NUM_FIELDS + FIELD)
    return place.to(gl.pointer_type(dtype))


@gluon.jit
def matrix_of(table, layer, FIELD: gl.constexpr, dtype: gl.constexpr, c):
    """Look up the addresses of a layer's matrix and of its scales, which only quantized weights have."""
    weight = address(table, layer, FIELD, stored_dtype(dtype, c.FP8_WEIGHTS))
    scales = weight
    if c.FP8_WEIGHTS:
        kind: gl.constexpr = gl.int32 if c.PART_SCALES > 0 else gl.float32
        scales = address(table, c.LAYERS + layer, FIELD, kind)
    return weight, scales


@gluon.jit
def cache_of(table, layer, dtype: gl.constexpr, c):
    """Look up the addresses of a layer's cache, for a model in `dtype`: (keys, scales), (values, scales)."""
    numbers: gl.constexpr = stored_dtype(dtype, c.FP8)
    keys = address(table, layer, KEYS, numbers), address(table, layer, KEY_SCALES, gl.float32)
    values = address(table, layer, VALUES, numbers), address(table, layer, VALUE_SCALES, gl.float32)
    return keys, values


@gluon.jit
def window_of(table, layer):
    """Return how many tokens a layer attends, itself included; 0 if all."""
    return gl.load(table + layer * _NUM_FIELDS + WINDOW).to(gl.int32)


@gluon.jit
def first_key(table, layer, past, c):
    """Return the first key that a layer's window shows to the step's token, which follows `past` others."""
    first = past * 0
    if c.WINDOWS:
        window = window_of(table, layer)
        first = gl.where(window > 0, gl.maximum(past - window + 1, 0), 0)
    return first


@gluon.jit
def key_range(seen, position, split, c):
    """Return the stages of keys that a split attends, of those with keys from `seen` to `position`.

    Returns:
        (number of splits, first stage, last stage + 1); the range is empty for a split past the last one.
    """
    skipped = seen // c.KEYS
    stages = position // c.KEYS + 1 - skipped
    splits = gl.minimum(stages, c.SPLITS)
    each = (stages + splits - 1) // splits
    splits = (stages + each - 1) // each
    first = skipped + gl.minimum(split * each, stages)
    return splits, first, skipped + gl.minimum((split + 1) * each, stages)


@gluon.jit
def head_element(place, c):
    """Return the element of a head at a place of its padded form [DP], and whether there is one."""
    if c.D == c.DP:
        return place, place >= 0
    within = place % (c.DP // 2)
    return place // (c.DP // 2) * (c.D // 2) + within, within < c.D // 2


@gluon.constexpr_function
def parts_per_stage(fp8):
    """Return how many parts a stage holds, of FP8 weights or others."""
    return 2 * PARTS.value if fp8 else PARTS.value


@gluon.constexpr_function
def stored_size(inputs, fp8):
    """Return how many stored numbers a row of weights has: bytes of 4-bit weights."""
    return inputs // 2 if fp8 == INT4.value else inputs


@gluon.constexpr_function
def scale_stride(inputs, fp8, part_scales):
    """Return how many scales a row of weights has; those of groups as `kernels.step.packed_scales` arranges them."""
    if not fp8 or not part_scales:
        return 1
    return stages_of(inputs, fp8) * parts_per_stage(fp8) * part_scales


@gluon.constexpr_function
def stages_of(inputs, fp8=False):
    """Return how many stages ROWS rows of weights take."""
    return -(-stored_size(inputs, fp8) // (parts_per_stage(fp8) * COLUMNS.value))


@gluon.constexpr_function
def parts_in(inputs, stage, fp8=False):
    """Return how many parts of ROWS rows of weights are in one of their stages."""
    parts = -(-stored_size(inputs, fp8) // COLUMNS.value)
    return min(parts_per_stage(fp8), parts - stage * parts_per_stage(fp8))


@gluon.constexpr_function
def parts_sent(inputs, stage, of_rows, fp8=False):
    """Return how many parts of a stage are filled; in a step of rows a multiple of PARTS, the last with zeros."""
    parts = parts_in(inputs, stage, fp8)
    return -(-parts // PARTS.value) * PARTS.value if of_rows else parts


@gluon.constexpr_function
def flying_of(inputs, flying, fp8):
    """Return how many stages of ROWS rows of weights a program copies at once.

    `flying` stages of the model's dtype; twice as many where FP8 weights fill each only up to the half, one more where
    every second stage holds a single part, so that two full stages are under way as with other sizes.
    """
    if fp8 and stored_size(inputs, fp8) <= PARTS.value * COLUMNS.value:
        return 2 * flying
    small = stages_of(inputs, fp8) == 2 and parts_in(inputs, 1, fp8) == 1
    return flying + 1 if small and flying > 1 else flying


@gluon.jit
def attended(c):
    """Return what this program attends: row, key-value head, part of the head's queries, and group of splits.

    A group is LOCAL splits: number `split_group` * LOCAL and those after it.
    """
    unit = gl.program_id(0) % c.UNITS
    split_group = gl.program_id(0) // c.UNITS
    kv_head = unit % c.KV_HEADS
    part = unit // c.KV_HEADS
    row = 0
    if c.BATCH > 1:
        row = part // c.GROUP_SPLITS
        part = part % c.GROUP_SPLITS
    return row, kv_head, part, split_group


@gluon.jit
def first_tile(layer, BEFORE: gl.constexpr, c):
    """Return this program's first tile of a matrix; of n programs each gets every n-th tile.

    The first tile goes to the program after that which got the last one of the matrix before, so that in the end all
    have about as many. With EARLY it goes to program 0, since a program clears the places that it publishes to.
    `BEFORE` are the layer's tiles in the matrices before this one; QKV is divided by heads (`projected_row`).
    """
    first = gl.program_id(0)
    if not c.EARLY:
        ALL: gl.constexpr = (2 * c.HIDDEN + c.INNER) // ROWS
        first -= (layer * ALL + BEFORE) % gl.num_programs(0)
        first = gl.where(first < 0, first + gl.num_programs(0), first)
    return first


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
