"""What the drawing kernels are told of each row, as numbers of one table.

Knows no requests: filters and temperatures are numbers here.
"""

from __future__ import annotations

from typing import NamedTuple

GREEDY, UNFILTERED, FILTERED = range(3)
"""Kinds of rows: the most likely token; a draw in the order of ids; one in the order of likelihood."""

WEIGHT_SCALE = 2.0**40
"""Units of a weight: exp(logit - largest logit) is cut to a multiple of 2^-40."""

_MOST_LISTED = 2048


class DrawSizes(NamedTuple):
    """How the kernels cut a row; no size changes a result.

    Attributes:
        tile: logits of a program that looks at all of them.
        group: neighbours whose largest logit is kept, to tell how far the candidates reach.
        capacity: candidates that a row's list holds.
        chunk: candidates, or logits, that are compared at once.
        loads: chunks of logits that are asked for at once.
        ways: parts that a search in a list divides a range into.
        row_ways: the same for a search in a row's logits.
    """

    tile: int = 2048
    group: int = 32
    capacity: int = 4096
    chunk: int = 256
    loads: int = 4
    ways: int = 8
    row_ways: int = 8


DRAW_SIZES = DrawSizes()


class DrawRow(NamedTuple):
    """One row of the table, all float64, which holds every one of them exactly.

    Attributes:
        source: row of the logits.
        target: row of the answers.
        kind: `GREEDY`, `UNFILTERED` or `FILTERED`.
        uniform: random number in [0, 1).
        inverse_temperature: factor on differences of logits.
        top_k: tokens kept, with all that tie with the last of them; 0 keeps all.
        top_p: mass kept; 1 keeps all.
        min_p_distance: how far below the largest a scaled logit may be.
        reach: groups whose largest logits are candidates at least; 0 if all tokens with a weight are.
        least: smallest weight of a candidate.
    """

    source: int
    target: int
    kind: int
    uniform: float = 0.0
    inverse_temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p_distance: float = float("inf")
    reach: int = 0
    least: int = 1


def candidate_bounds(
    vocabulary: int, top_k: int, top_p: float, sizes: DrawSizes = DRAW_SIZES
) -> tuple[int, int]:
    """Return `reach` and `least` of a filtered row.

    Among the largest logits of k groups are k tokens, so the k-th of all is not below the least of them. Without a
    top_k it is a guess how many tokens matter; a draw that proves it wrong looks at all of them.

    Args:
        vocabulary: logits of a row.
        top_k: below it; 0 is off.
        top_p: in (0, 1].
        sizes: of the kernels.
    """
    groups = -(-vocabulary // sizes.group)
    wanted = top_k or min(_MOST_LISTED, groups // 2)
    reach = wanted if wanted <= groups and vocabulary > sizes.capacity else 0
    # Tokens below this weight hold less than 1 - top_p together, so all of them lie outside the nucleus. With
    # top_k the mass is that of its tokens, and all of them are needed to know it.
    least = 1 if top_k else max(int((1.0 - top_p) * WEIGHT_SCALE / vocabulary), 1)
    return reach, least
