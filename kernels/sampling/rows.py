"""The row table of the sampling kernels: the parameters of each row, as columns of numbers."""

from __future__ import annotations

from typing import NamedTuple

GREEDY, UNFILTERED, FILTERED = range(3)
"""Kinds of rows: argmax; sampled from all tokens; sampled from those that filters keep."""

WEIGHT_SCALE = 2.0**40
"""Probabilities are summed as integers: the weight exp(logit - largest logit) in units of 2^-40.

Integer sums do not depend on the order of the additions, so neither the number of rows nor the way in which a device
splits a sum can change a sampled token. An int64 holds the sum over 2^22 tokens, and a weight rounds to zero only if
the token is 10^12 times less likely than the most likely one.
"""

ENTROPY_SCALE = 2.0**36
"""Terms p * d of an entropy, of the probability exp(-d) at a distance d, are summed as integers in units of 2^-36.

A term is at most 1 / e, so an int64 holds the sum of more than 2^22 of them.
"""

_MOST_LISTED = 2048


class SampleSizes(NamedTuple):
    """Tile sizes of the kernels. Sizes change no result, but `tile` the rounding of an unfiltered row's sums.

    Attributes:
        tile: logits per program of the kernels that read whole rows.
        group: adjacent logits whose maximum is kept, to bound how far the candidates of a row reach.
        capacity: candidates that the list of a row holds.
        chunk: candidates, or logits, that are compared at once.
        loads: chunks of logits that are loaded at once.
        ways: parts into which a search in a list divides a range.
        row_ways: parts into which a search in the logits of a row divides a range.
    """

    tile: int = 2048
    group: int = 32
    capacity: int = 4096
    chunk: int = 256
    loads: int = 4
    ways: int = 8
    row_ways: int = 8


SAMPLE_SIZES = SampleSizes()


class SampleRow(NamedTuple):
    """One row of the table. All columns are float64, which holds each value exactly.

    Attributes:
        source: row of the logits.
        target: row of the output.
        mask: row of the token masks; -1 for none.
        kind: `GREEDY`, `UNFILTERED` or `FILTERED`.
        noise_low: the lower 32 bits of the key of the row's noise (`kernels.sampling.noise`).
        noise_high: the upper 32 bits.
        inverse_temperature: factor on differences of logits.
        top_k: tokens kept, with all that tie with the last of them; 0 keeps all.
        top_p: probability mass kept; 1 keeps all.
        min_p_distance: largest distance of a kept token's scaled logit from the largest one; not -0.
        typical_p: probability mass of the most typical tokens, which are kept; 1 keeps all.
        reach: number of groups, by descending maximum, that the candidates cover at least; 0 if every token with a
            weight is a candidate.
        least: smallest weight of a candidate.
    """

    source: int
    target: int
    mask: int
    kind: int
    noise_low: int = 0
    noise_high: int = 0
    inverse_temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p_distance: float = float("inf")
    typical_p: float = 1.0
    reach: int = 0
    least: int = 1


def candidate_bounds(
    vocabulary: int, top_k: int, top_p: float, sizes: SampleSizes = SAMPLE_SIZES
) -> tuple[int, int]:
    """Return `reach` and `least` of a filtered row.

    The k groups with the largest maxima hold at least k tokens, so the k-th largest logit is not below the smallest of
    these maxima. Without a top_k, `reach` is a guess of how many tokens matter; a row for which the guess is too small
    is searched in its logits instead of its list of candidates.

    Args:
        vocabulary: logits of a row.
        top_k: below `vocabulary`; 0 is off.
        top_p: in (0, 1].
        sizes: of the kernels.
    """
    groups = -(-vocabulary // sizes.group)
    wanted = top_k or min(_MOST_LISTED, groups // 2)
    reach = wanted if wanted <= groups and vocabulary > sizes.capacity else 0
    # Tokens below this weight hold less than 1 - top_p together, so all of them lie outside the nucleus. With
    # top_k the mass is that of its tokens, and all of them are needed to compute it.
    least = 1 if top_k else max(int((1.0 - top_p) * WEIGHT_SCALE / vocabulary), 1)
    return reach, least
