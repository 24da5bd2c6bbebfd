"""Samples a filtered row: the filters select tokens in the order of probability, without sorting.

The tokens of a row are ordered by key (`ordering_keys`: distance below the peak, then id). Every filter but the last,
typical_p, keeps a prefix of that order. top_k and top_p thus look for the first key whose cumulative amount exceeds a
target: the count of tokens for top_k, their weight for top_p. It is found by dividing a window of keys, [low, high),
into parts until one token is left: in the list of candidates where the window lies within it, else in the logits until
the window is small enough for a list. typical_p keeps a range of distances, which is bisected.
"""
# An aggregate reads its annotations when its class is created, so they cannot be postponed to strings.

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gpu.functions import LOWEST_KEY, ranked_id, ranking_keys
from kernels.sampling.gpu.noise import gumbel_noise, load_noise_key
from kernels.sampling.gpu.row_table import (
    COLUMNS,
    ENTROPY_SCALE,
    FILTERED,
    INVERSE_TEMPERATURE,
    MIN_P_DISTANCE,
    TARGET,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    WEIGHT_SCALE,
    apply_mask,
    load_logits,
    logits_of,
)
from kernels.sampling.gpu.sample_tiles import ordering_keys, weights_of

_NOWHERE = tl.constexpr(0x7F800000)
"""Bits of an infinite distance."""
_WEIGHTLESS = tl.constexpr(0x41E00000)
"""Bits of 28: at that distance below the peak no token has a weight."""
_FIRST_WEIGHTLESS = tl.constexpr(0x41DDCE9E)
"""Bits of 40 ln 2: the smallest distance at which a token has no weight."""
_WIDE = tl.constexpr(256)
"""Units of the last bit of a float32: the ends of a part of this many are distinct distances despite rounding."""

_EVERYTHING = tl.constexpr(2**62)
"""Above the amount of all tokens of a row."""
_ANYWHERE = tl.constexpr(0x7FFFFFFF)
"""Above the bits of every distance from the mean."""


@aggregate
class Row:
    """A row of logits, its list of candidates, and the constants of the kernel.

    Attributes:
        logits: with `masks` and `entry` the row's logits, as `logits_of` returns them.
        masks: see `logits`.
        entry: see `logits`.
        listed: address of the list's [CAPACITY] int64 keys.
        peak: float32, the largest logit.
        scale: float32, factor on distances.
        V: logits of the row.
        CAPACITY: tokens that the list can hold.
        ID_BITS: low bits of a key, which hold the token's id.
        BLOCK: tokens of a part that is read at once.
        LOADS: parts of the logits that are loaded before any of them is used; one of the list.
        WAYS: parts of a window of listed tokens.
        ROW_WAYS: parts of a window of logits.
    """

    logits: tl.tensor
    masks: tl.tensor
    entry: tl.tensor
    listed: tl.tensor
    peak: tl.tensor
    scale: tl.tensor
    V: tl.constexpr
    CAPACITY: tl.constexpr
    ID_BITS: tl.constexpr
    BLOCK: tl.constexpr
    LOADS: tl.constexpr
    WAYS: tl.constexpr
    ROW_WAYS: tl.constexpr

    @triton.constexpr_function
    def __init__(
        self, source, listed, peak, scale, V, CAPACITY, ID_BITS, BLOCK, LOADS, WAYS, ROW_WAYS
    ) -> None:
        self.logits, self.masks, self.entry = source[0], source[1], source[2]
        self.listed = listed
        self.peak = peak
        self.scale = scale
        self.V = tl.constexpr(V)
        self.CAPACITY = tl.constexpr(CAPACITY)
        self.ID_BITS = tl.constexpr(ID_BITS)
        self.BLOCK = tl.constexpr(BLOCK)
        self.LOADS = tl.constexpr(LOADS)
        self.WAYS = tl.constexpr(WAYS)
        self.ROW_WAYS = tl.constexpr(ROW_WAYS)


@aggregate
class Window:
    """A range of keys; all are int64.

    Attributes:
        low: first key.
        high: first key beyond.
        low_amount: amount of all keys below `low`.
        high_amount: amount of all keys below `high`.
    """

    low: tl.tensor
    high: tl.tensor
    low_amount: tl.tensor
    high_amount: tl.tensor

    @triton.constexpr_function
    def __init__(self, low, high, low_amount, high_amount) -> None:
        self.low = low
        self.high = high
        self.low_amount = low_amount
        self.high_amount = high_amount


@triton.constexpr_function
def loads_of(row, IN_LIST):
    """Return how many parts of the list, or of the logits, are loaded before any of them is used."""
    return 1 if IN_LIST else row.LOADS


@triton.constexpr_function
def ways_of(row, IN_LIST):
    """Return how many parts a window of listed tokens, or of logits, is divided into."""
    return row.WAYS if IN_LIST else row.ROW_WAYS


@triton.jit
def load_parts(row, start, size, IN_LIST: tl.constexpr):
    """Load parts of the listed candidates, or of the logits, before any of them is used."""
    parts = ()
    for i in tl.static_range(loads_of(row, IN_LIST)):
        at = start + i * row.BLOCK + tl.arange(0, row.BLOCK)
        if IN_LIST:
            parts = parts + (tl.load(row.listed + at, mask=at < size, other=0),)  # type: ignore[assignment]
        else:
            parts = parts + (load_logits((row.logits, row.masks, row.entry), at, size),)  # type: ignore[assignment]
    return parts


@triton.jit
def keys_of(row, part, start, size, IN_LIST: tl.constexpr):
    """Return keys and weights of a part that `load_parts` loaded."""
    at = start + tl.arange(0, row.BLOCK)
    if IN_LIST:
        nowhere = tl.full([row.BLOCK], _NOWHERE, tl.int64) << row.ID_BITS
        keys = tl.where(at < size, part, nowhere)
    else:
        values = apply_mask((row.logits, row.masks, row.entry), part, start, size)
        keys = ordering_keys((row.peak - values) * row.scale, at, row.ID_BITS)
    return keys, weights_of(distances_in(row, keys))


@triton.jit
def distances_in(row, keys):
    """Return the distances in keys."""
    return (keys >> row.ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def bits_apart(row, keys, mean):
    """Return the bits of the differences between the distances in keys and their mean; they order like these."""
    return tl.abs(distances_in(row, keys) - mean).to(tl.int32, bitcast=True)


@triton.jit
def tighten(row, window, size, IN_LIST: tl.constexpr):
    """Shrink a window to the range from its first token with a weight to its last; the amounts stay."""
    LOADS: tl.constexpr = loads_of(row, IN_LIST)
    low, high = window.low, window.high
    least = tl.full([row.BLOCK], 0, tl.int64) + high
    most = tl.full([row.BLOCK], -1, tl.int64)
    for start in range(0, size, row.BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(row, parts[i], start + i * row.BLOCK, size, IN_LIST)
            inside = (keys >= low) & (keys < high) & (weights > 0)
            least = tl.minimum(least, tl.where(inside, keys, high))
            most = tl.maximum(most, tl.where(inside, keys, -1))
    return Window(tl.min(least, 0), tl.max(most, 0) + 1, window.low_amount, window.high_amount)


@triton.jit
def split(low, high, ID_BITS: tl.constexpr, WAYS: tl.constexpr):
    """Return the upper edges [WAYS] of the parts of a window; the last is `high`.

    Tokens are spread more evenly over distances than over the bits of floats, so a wide window is divided by distance.
    """
    part = tl.arange(0, WAYS) + 1
    low_bits, high_bits = (low >> ID_BITS).to(tl.int32), (high >> ID_BITS).to(tl.int32)
    nearest = low_bits.to(tl.float32, bitcast=True)
    farthest = high_bits.to(tl.float32, bitcast=True)
    distances = nearest + (farthest - nearest) * (part.to(tl.float32) / WAYS)
    by_distance = distances.to(tl.int32, bitcast=True).to(tl.int64) << ID_BITS
    by_distance = tl.minimum(tl.maximum(by_distance, low), high)
    wide = high_bits - low_bits > _WIDE
    edges = tl.where(wide, by_distance, low + (high - low) * part // WAYS)
    return tl.where(part == WAYS, high, edges)


@triton.jit
def measure(row, size, counting, edges, IN_LIST: tl.constexpr):
    """Return the amounts and the numbers [ways] of the tokens with a weight below each edge."""
    LOADS: tl.constexpr = loads_of(row, IN_LIST)
    WAYS: tl.constexpr = ways_of(row, IN_LIST)
    sums = tl.full([row.BLOCK, WAYS], 0, tl.int64)
    numbers = tl.full([row.BLOCK, WAYS], 0, tl.int32)
    for start in range(0, size, row.BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(row, parts[i], start + i * row.BLOCK, size, IN_LIST)
            exists = weights > 0
            amounts = tl.where(counting, exists.to(tl.int64), weights)
            below = keys[:, None] < edges[None, :]
            sums += tl.where(below, amounts[:, None], 0)
            numbers += (below & exists[:, None]).to(tl.int32)
    return tl.sum(sums, 0), tl.sum(numbers, 0)


@triton.jit
def narrow(row, window, size, target, counting, enough, IN_LIST: tl.constexpr):
    """Narrow a window around the first key whose cumulative amount exceeds `target` to at most `enough` tokens.

    A list holds the keys from the `low` of its window on; logits have at most `size` tokens below `high`.
    """
    low, high = window.low, window.high
    low_amount, high_amount = window.low_amount, window.high_amount
    base = low_amount
    below = tl.full([], 0, tl.int32)
    up_to = below + size
    while up_to - below > enough:
        number = up_to - below
        edges = split(low, high, row.ID_BITS, ways_of(row, IN_LIST))
        amounts, numbers = measure(row, size, counting, edges, IN_LIST)
        amounts += base
        beyond = amounts > target
        low_amount = tl.maximum(low_amount, tl.max(tl.where(beyond, low_amount, amounts), 0))
        high_amount = tl.minimum(high_amount, tl.min(tl.where(beyond, amounts, high_amount), 0))
        below = tl.maximum(below, tl.max(tl.where(beyond, below, numbers), 0))
        up_to = tl.minimum(up_to, tl.min(tl.where(beyond, numbers, up_to), 0))
        low = tl.maximum(low, tl.max(tl.where(beyond, low, edges), 0))
        high = tl.min(tl.where(beyond, edges, high), 0)
        if 2 * (up_to - below) > number:
            # Most of the window is empty: dividing it further finds nothing.
            tight = tighten(row, Window(low, high, low_amount, high_amount), size, IN_LIST)
            low, high = tight.low, tight.high
    return Window(low, high, low_amount, high_amount)


@triton.jit
def gather(row, window):
    """Write the tokens with a weight in a window to the list; return their number."""
    tl.debug_barrier()  # all threads have read the previous list
    number = tl.full([], 0, tl.int32)
    for start in range(0, row.V, row.BLOCK * row.LOADS):
        parts = load_parts(row, start, row.V, False)
        for i in tl.static_range(row.LOADS):
            keys, weights = keys_of(row, parts[i], start + i * row.BLOCK, row.V, False)
            wanted = (keys >= window.low) & (keys < window.high) & (weights > 0)
            at = number + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(row.listed + at, keys, mask=wanted)
            number += tl.sum(wanted.to(tl.int32), 0)
    tl.debug_barrier()
    return number


@triton.jit
def weight_below(row, size, edge, IN_LIST: tl.constexpr):
    """Return the weight of all keys below an edge."""
    LOADS: tl.constexpr = loads_of(row, IN_LIST)
    sums = tl.full([row.BLOCK], 0, tl.int64)
    for start in range(0, size, row.BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(row, parts[i], start + i * row.BLOCK, size, IN_LIST)
            sums += tl.where(keys < edge, weights, 0)
    return tl.sum(sums, 0)


@triton.jit
def weights_within(row, size, edge, mean, spreads, IN_LIST: tl.constexpr):
    """Return the weight [ways] of all keys below an edge that are at most each of `spreads` apart from the mean."""
    LOADS: tl.constexpr = loads_of(row, IN_LIST)
    sums = tl.full([row.BLOCK, ways_of(row, IN_LIST)], 0, tl.int64)
    for start in range(0, size, row.BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST)
        for i in tl.static_range(LOADS):
            keys, weights = keys_of(row, parts[i], start + i * row.BLOCK, size, IN_LIST)
            weights = tl.where(keys < edge, weights, 0)
            within = bits_apart(row, keys, mean)[:, None] <= spreads[None, :]
            sums += tl.where(within, weights[:, None], 0)
    return tl.sum(sums, 0)


@triton.jit
def mean_below(row, size, edge, total, IN_LIST: tl.constexpr):
    """Return the mean distance of all keys below an edge, whose weight is `total`."""
    LOADS: tl.constexpr = loads_of(row, IN_LIST)
    sums = tl.full([row.BLOCK], 0, tl.int64)
    for start in range(0, size, row.BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST)
        for i in tl.static_range(LOADS):
            keys, _ = keys_of(row, parts[i], start + i * row.BLOCK, size, IN_LIST)
            distances = distances_in(row, keys)
            terms = (tl.exp(-distances) * distances * ENTROPY_SCALE).to(tl.int64)
            sums += tl.where(keys < edge, terms, 0)
    product = tl.sum(sums, 0).to(tl.float64) * (WEIGHT_SCALE / ENTROPY_SCALE)
    return (product / total.to(tl.float64)).to(tl.float32)


@triton.jit
def find_typical(row, size, edge, mass, IN_LIST: tl.constexpr):
    """Find the most typical tokens that hold `mass` of the weight of all keys below an edge.

    Returns:
        The mean distance, and the bits of the largest difference from it.

    Source: Locally Typical Sampling (Meister et al. 2022).
    """
    WAYS: tl.constexpr = ways_of(row, IN_LIST)
    total = weight_below(row, size, edge, IN_LIST)
    mean = mean_below(row, size, edge, total, IN_LIST)
    target = tl.minimum(ceiling(mass * total.to(tl.float64)), total)
    spread = tl.full([], 0, tl.int32)
    step = spread + (1 << 30) // WAYS * 2
    while step > 0:
        # Up to `spread` - 1 is too little.
        spreads = spread + (step - 1) + step * tl.arange(0, WAYS)
        few = weights_within(row, size, edge, mean, spreads, IN_LIST) < target
        spread += step * tl.minimum(tl.sum(few.to(tl.int32), 0), WAYS - 1)
        step = tl.where(step > 1, tl.maximum(step // WAYS, 1), 0)
    return mean, spread


@triton.jit
def ceiling(x):
    """Return the smallest int64 that is not below a float64."""
    cut = x.to(tl.int64)
    return cut + (cut.to(tl.float64) < x).to(tl.int64)


@triton.jit
def sample_below(row, noise_key, size, edge, typical_p, IN_LIST: tl.constexpr):
    """Return the id of the token with the largest sum of noise minus distance among all keys below an edge.

    With a `typical_p` below 1 only of those that it keeps.
    """
    mean = tl.full([], 0.0, tl.float32)
    spread = tl.full([], _ANYWHERE, tl.int32)
    if typical_p < 1.0:
        edge = tl.minimum(edge, tl.full([], _FIRST_WEIGHTLESS, tl.int64) << row.ID_BITS)
        mean, spread = find_typical(row, size, edge, typical_p, IN_LIST)
    LOADS: tl.constexpr = loads_of(row, IN_LIST)
    best = tl.full([row.BLOCK], LOWEST_KEY, tl.int64)
    for start in range(0, size, row.BLOCK * LOADS):
        parts = load_parts(row, start, size, IN_LIST)
        for i in tl.static_range(LOADS):
            keys, _ = keys_of(row, parts[i], start + i * row.BLOCK, size, IN_LIST)
            high = keys >> row.ID_BITS
            ids = (keys - (high << row.ID_BITS)).to(tl.int32)
            totals = ranking_keys(gumbel_noise(noise_key, ids) - distances_in(row, keys), ids)
            kept = (keys < edge) & (bits_apart(row, keys, mean) <= spread)
            best = tl.maximum(best, tl.where(kept, totals, LOWEST_KEY))
    return ranked_id(tl.max(best, 0))


@triton.jit
def find(row, window, size, target, counting):
    """Find the first key whose cumulative amount exceeds `target`, after listing the keys around it where needed.

    Args:
        row: the row.
        window: of the list.
        size: tokens of the list.
        target: int64.
        counting: whether amounts are counts of tokens; else they are weights.

    Returns:
        A window of that key alone, and the window and the size of the list.
    """
    if (target < window.low_amount) | (target >= window.high_amount):
        end = tl.full([], _WEIGHTLESS, tl.int64) << row.ID_BITS
        window = Window(end * 0, end, end * 0, end * 0 + _EVERYTHING)
        # Triton's compiler fails on a loop that it can prove is never entered.
        if row.V > row.CAPACITY:
            window = narrow(row, window, row.V, target, counting, row.CAPACITY, False)
        size = gather(row, window)
    found = narrow(row, window, size, target, counting, 1, True)
    return tighten(row, found, size, True), window, size


@triton.jit
def sample_filtered(
    logits, table, masks, kinds, peaks, counts, sums, listed, tokens, checked, row_stride,
    V: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr, LOADS: tl.constexpr, WAYS: tl.constexpr, ROW_WAYS: tl.constexpr,
    ID_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply top_k, top_p, min_p and typical_p, each to what the previous filter kept, and sample; program (row)."""
    number = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if tl.load(kinds + number) != FILTERED:
        return
    entry = table + number * COLUMNS
    source = logits_of(logits, masks, entry, row_stride)
    scale = tl.load(entry + INVERSE_TEMPERATURE).to(tl.float32)
    peak = tl.load(peaks + number)
    row = Row(
        source, listed + number * CAPACITY, peak, scale, V, CAPACITY, ID_BITS, BLOCK, LOADS, WAYS, ROW_WAYS
    )  # fmt: skip
    candidates = tl.load(counts + number)
    tile = tl.arange(0, TILES)
    of_tiles = sums + number * 2 * NUM_TILES + tile

    # The window of the list, and the amounts below its ends: counts at first, weights from the second stage on. A list
    # that overflowed is not used.
    first = tl.full([], 0, tl.int64)
    end = tl.full([], _WEIGHTLESS, tl.int64) << ID_BITS
    size = tl.where(candidates <= CAPACITY, candidates, 0)
    window = Window(first, end, first, size.to(tl.int64))

    # Tokens whose keys are below `limit` are kept; their weight is at most `kept`.
    kept = tl.sum(tl.load(of_tiles, mask=tile < NUM_TILES, other=0), 0)
    limit = end
    listed_weight = first
    is_listed = candidates <= CAPACITY
    for stage in range(2):
        counting = stage == 0
        # Where there are fewer candidates than top_k, they are all tokens with a weight.
        top_k = tl.load(entry + TOP_K).to(tl.int32)
        needed = (top_k > 0) & (top_k <= candidates)
        target = top_k.to(tl.int64) - 1
        if stage == 1:
            top_p = tl.load(entry + TOP_P)
            target = ceiling(top_p * kept.to(tl.float64)) - 1
            near = tl.load(of_tiles + NUM_TILES, mask=tile < NUM_TILES, other=0)
            kept = tl.minimum(kept, tl.sum(near, 0))
            # A mass of 1 never cuts: rounding the total to a float must not drop a token.
            needed = (top_p < 1.0) & (target < kept)
            is_listed = is_listed & ((target < window.high_amount) | (needed == 0))
        if needed:
            found, window, size = find(row, window, size, target, counting)
            edge = found.high
            if stage == 0:
                # Tokens that tie with the last one are kept, and may lie outside of the window.
                edge = ((found.low >> ID_BITS) + 1) << ID_BITS
                if candidates <= CAPACITY:
                    kept = weight_below(row, size, edge, True)
                else:
                    kept = weight_below(row, V, edge, False)
            if stage == 1:
                kept = tl.minimum(kept, found.high_amount)
            limit = tl.minimum(limit, edge)
        if stage == 0:
            size = tl.where(candidates <= CAPACITY, size, 0)
            listed_weight = weight_below(row, size, end, True)
            window = Window(window.low, window.high, first, listed_weight)
    most = tl.load(entry + MIN_P_DISTANCE).to(tl.float32)
    beyond = (most.to(tl.int32, bitcast=True).to(tl.int64) + 1) << ID_BITS
    limit = tl.minimum(limit, beyond)
    noise_key = load_noise_key(entry)
    typical_p = tl.load(entry + TYPICAL_P)
    # The list of candidates is a prefix of the order, so it holds all kept tokens if it has their weight.
    if is_listed & (kept <= listed_weight):
        token = sample_below(row, noise_key, size, limit, typical_p, True)
    else:
        token = sample_below(row, noise_key, V, limit, typical_p, False)
    to = tl.load(entry + TARGET).to(tl.int64)
    tl.store(tokens + to, token)
    tl.store(checked + to, token)
