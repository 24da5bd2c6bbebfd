"""What the forward and the two backward kernels of attention for training share: positions, scores, masks, dropout.

Triton device functions. All three kernels compute a tile's scores by the same functions, so they agree on what a query
sees and on which weights are dropped. Scores are in units of log2.

    pos_q, pos_k    indices of the tile's queries and keys in their sequence, one of them a column, the other a row
    offset          n - m: query i has the position of key i + offset
"""
# An aggregate reads its annotations when its class is created, so they cannot be postponed to strings.

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@aggregate
class ScoreParams:
    """Parameters of the scores of one head of a sequence.

    Attributes:
        num_q: queries of the sequence.
        num_k: keys of the sequence.
        head: the query head.
        sequence: index of the sequence.
        scale: factor on the products.
        softcap: see `TrainingProblem`; read with `SOFTCAP`.
        window: keys that a query sees at most; read with `WINDOW`.
        slope: of ALiBi; read with `ALIBI`.
        seed: of the dropout; with `threshold` and `keep_scale` read with `DROPOUT`.
        threshold: random numbers from it on keep a weight.
        keep_scale: factor on the weights that are kept.
        PRECISION: of `tl.dot`.
        BLOCK_D: `HEAD_DIM` rounded up to a power of two, the columns of a tile.
    """

    num_q: tl.tensor
    num_k: tl.tensor
    head: tl.tensor
    sequence: tl.tensor
    scale: tl.tensor
    softcap: tl.tensor
    window: tl.tensor
    slope: tl.tensor
    seed: tl.tensor
    threshold: tl.tensor
    keep_scale: tl.tensor
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    SOFTCAP: tl.constexpr
    ALIBI: tl.constexpr
    DROPOUT: tl.constexpr
    PRECISION: tl.constexpr
    HEAD_DIM: tl.constexpr
    BLOCK_D: tl.constexpr

    @triton.constexpr_function
    def __init__(
        self, head, numbers, CAUSAL, WINDOW, SOFTCAP, ALIBI, DROPOUT, PRECISION, HEAD_DIM, BLOCK_D
    ) -> None:
        self.num_q, self.num_k, self.head, self.sequence = head[0], head[1], head[2], head[3]
        self.scale, self.softcap = numbers[0], numbers[1]
        self.window, self.slope = numbers[2], numbers[3]
        self.seed, self.threshold, self.keep_scale = numbers[4], numbers[5], numbers[6]
        self.CAUSAL = tl.constexpr(CAUSAL)
        self.WINDOW = tl.constexpr(WINDOW)
        self.SOFTCAP = tl.constexpr(SOFTCAP)
        self.ALIBI = tl.constexpr(ALIBI)
        self.DROPOUT = tl.constexpr(DROPOUT)
        self.PRECISION = tl.constexpr(PRECISION)
        self.HEAD_DIM = tl.constexpr(HEAD_DIM)
        self.BLOCK_D = tl.constexpr(BLOCK_D)


@triton.jit
def score_numbers(scale, softcap, window, slope, seed, threshold, keep_scale):
    """Return the numbers of a `ScoreParams` as tensors; Triton's interpreter passes floats as Python's."""
    zero = tl.full((), 0.0, tl.float32)
    return scale + zero, softcap + zero, window, slope, seed, threshold, keep_scale + zero


@triton.jit
def load_seqlen(cu_seqlens, sequence):
    """Return the first token of a sequence and the number of its tokens."""
    start = tl.load(cu_seqlens + sequence)
    return start, tl.load(cu_seqlens + sequence + 1) - start


@triton.jit
def load_slope(slopes, sequence, head, HEADS: tl.constexpr, ALIBI: tl.constexpr):
    """Return the slope of a head of a sequence; any number without ALiBi."""
    if ALIBI:
        slope = tl.load(slopes + sequence * HEADS + head)
    else:
        slope = tl.full((), 0.0, tl.float32)
    return slope


@triton.jit
def load_tile(base, rows, row_stride, num_rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows of a head, [len(rows), BLOCK_D]; rows and columns beyond the tensor are 0."""
    columns = tl.arange(0, BLOCK_D)
    places = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    mask = rows[:, None] < num_rows
    if HEAD_DIM < BLOCK_D:
        mask = mask & (columns[None, :] < HEAD_DIM)
    return tl.load(places, mask=mask, other=0.0)


@triton.jit
def store_tile(
    base, rows, row_stride, num_rows, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store rows of a head, in the dtype of the tensor."""
    columns = tl.arange(0, BLOCK_D)
    places = base + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    mask = rows[:, None] < num_rows
    if HEAD_DIM < BLOCK_D:
        mask = mask & (columns[None, :] < HEAD_DIM)
    tl.store(places, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def score(products, pos_q, pos_k, params, MASKED: tl.constexpr):
    """Return the scores of a tile's products, and tanh of those before the softcap, for its derivative.

    Without a softcap the second result is of no use.

    Args:
        MASKED: whether the tile has keys that a query does not see; their scores are -inf.
    """
    if params.SOFTCAP:
        # tanh by the exponential, which Triton has everywhere.
        power = tl.exp2(products * (params.scale * 2.0 * LOG2_E / params.softcap))
        tanh = 1.0 - 2.0 / (power + 1.0)
        scores = tanh * (params.softcap * LOG2_E)
    else:
        scores = products * (params.scale * LOG2_E)
        tanh = scores
    distance = pos_q + (params.num_k - params.num_q) - pos_k
    if params.ALIBI:
        scores -= params.slope * LOG2_E * tl.abs(distance).to(tl.float32)
    if MASKED:
        seen = (pos_k < params.num_k) & (pos_q < params.num_q)
        if params.CAUSAL:
            seen = seen & (distance >= 0)
        if params.WINDOW:
            seen = seen & (distance < params.window)
        scores = tl.where(seen, scores, float("-inf"))
    return scores, tanh


@triton.jit
def score_keys(query, k, k_stride, at, rows, params, MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """Score a tile of keys, `at` on, for a tile of queries.

    Args:
        query: [len(rows), BLOCK_D].
        k: the head's keys.
        rows: indices of the queries.

    Returns:
        Indices of the keys, the keys, the scores [len(rows), BLOCK_N] and the tanh of `score`.
    """
    columns = at + tl.arange(0, BLOCK_N)
    key = load_tile(k, columns, k_stride, params.num_k, params.HEAD_DIM, params.BLOCK_D)
    products = tl.dot(query, tl.trans(key), input_precision=params.PRECISION)
    scores, tanh = score(products, rows[:, None], columns[None, :], params, MASKED)
    return columns, key, scores, tanh


@triton.jit
def drop(weights, pos_q, pos_k, params):
    """Set the weights to 0 that dropout drops, and scale the others; see `kernels.attention.training.philox`."""
    zero = (pos_q + pos_k) * 0
    bits, _, _, _ = tl.philox(
        params.seed,
        (zero + pos_k).to(tl.uint32),
        (zero + pos_q).to(tl.uint32),
        (zero + params.head).to(tl.uint32),
        (zero + params.sequence).to(tl.uint32),
    )
    keep = bits.to(tl.uint32, bitcast=True).to(tl.int64) >= params.threshold
    return tl.where(keep, weights * params.keep_scale, 0.0)


@triton.jit
def seen_keys(first, params, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the range of keys of which queries first to first + BLOCK_M - 1 see some.

    Returns:
        Where its tiles begin, where the tiles end that all of the queries see whole, and where the range ends. With a
        window no tile counts as whole, since most are at an edge.
    """
    low, high = 0, params.num_k
    offset = params.num_k - params.num_q
    whole = params.num_k // BLOCK_N * BLOCK_N
    if params.CAUSAL:
        last = tl.minimum(first + BLOCK_M, params.num_q)
        high = tl.minimum(params.num_k, tl.maximum(0, last + offset))
        whole = tl.minimum(whole, tl.maximum(0, first + 1 + offset) // BLOCK_N * BLOCK_N)
    if params.WINDOW:
        low = tl.maximum(0, first + offset - params.window + 1)
        low = low // BLOCK_N * BLOCK_N
        whole = low
    return low, whole, high


@triton.jit
def seeing_queries(first, params, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the range of queries that see some of the keys first to first + BLOCK_N - 1.

    Returns:
        Where its tiles begin, where the tiles that see all of the keys begin and end, and where the range ends.
    """
    low, high = 0, params.num_q
    offset = params.num_k - params.num_q
    if params.CAUSAL:
        low = tl.maximum(0, first - offset)
    if params.WINDOW:
        last = tl.minimum(first + BLOCK_N, params.num_k) - 1
        high = tl.minimum(params.num_q, tl.maximum(0, last + params.window - offset))
    low = low // BLOCK_M * BLOCK_M
    whole = low
    if params.CAUSAL:
        reach = tl.maximum(0, first + BLOCK_N - 1 - offset)
        whole = tl.maximum(low, (reach + BLOCK_M - 1) // BLOCK_M * BLOCK_M)
    if params.WINDOW:
        whole = high
    if first + BLOCK_N > params.num_k:
        whole = high
    whole = tl.minimum(whole, high)
    whole_end = tl.maximum(whole, tl.minimum(params.num_q // BLOCK_M * BLOCK_M, high))
    return low, whole, whole_end, high
