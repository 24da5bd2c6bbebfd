"""Block masks from tiles and from functions of positions."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.errors import ShapeError


@pytest.mark.parametrize(
    ("predicate", "listed"),
    [
        (lambda q, k: (q // 4 + k // 8) % 2 == 0, [[1, 0, 1], [0, 1, 0], [1, 0, 1]]),
        (lambda q, k: (q >= 8) & (k < 16), [[0, 0, 0], [0, 0, 0], [1, 1, 0]]),
        (lambda _q, k: k >= 0, [[1, 1, 1]] * 3),
        (lambda q, _k: q < 4, [[1, 1, 1], [0, 0, 0], [0, 0, 0]]),
    ],
)
def test_a_predicate_gives_the_tiles_in_which_it_holds(predicate, listed):
    # The last tiles have 2 queries and 3 keys.
    found = kernels.BlockMask.from_predicate(predicate, 10, 19, 4, 8)
    wanted = kernels.BlockMask.from_tiles(torch.tensor(listed, dtype=torch.bool), 4, 8)

    assert all(map(torch.equal, found.arrays, wanted.arrays))
    assert (found.block_q, found.block_k) == (4, 8)


def test_attention_sees_what_the_predicate_says():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 48, 2, 16) for _ in range(3))

    def predicate(q, k):
        return (q // 16 == k // 16) | (k < 16)

    mask = kernels.BlockMask.from_predicate(predicate, 48, 48, 16, 16)
    out = kernels.flash_attention(q, k, v, causal=True, block_mask=mask)

    at = torch.arange(48)
    seen = predicate(at[:, None], at) & (at <= at[:, None])
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(it.transpose(1, 2) for it in (q, k, v)), attn_mask=seen
    )
    torch.testing.assert_close(out, wanted.transpose(1, 2))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 9), (9, 0), (0, 0)])
def test_a_predicate_of_nothing_gives_no_tiles(num_queries, num_keys):
    mask = kernels.BlockMask.from_predicate(lambda q, k: q >= k, num_queries, num_keys, 4, 4)

    assert not len(mask.columns)


@pytest.mark.parametrize(
    ("predicate", "words"),
    [
        (lambda q, k: k <= q, "differs within the tile of queries 0 to 3 and keys 0 to 7; leave causal"),
        (lambda q, k: (q < 9) & (k >= 0), "queries 8 to 9 and keys 0 to 7"),
        (lambda q, k: (q >= 0) & (k < 17), "queries 0 to 3 and keys 16 to 18"),
        (lambda _q, k: k[:5] >= 0, r"returned \[5\]; expected \[4, 19\]"),
        (lambda q, k: q + k, "returned torch.int64; expected bool"),
    ],
)  # fmt: skip
def test_a_predicate_that_tiles_cannot_express_is_refused(predicate, words):
    with pytest.raises(ShapeError, match=words):
        kernels.BlockMask.from_predicate(predicate, 10, 19, 4, 8)


def test_tiles_of_nothing_are_refused():
    with pytest.raises(ShapeError, match="a tile of 0 queries and 8 keys"):
        kernels.BlockMask.from_predicate(lambda q, k: q >= k, 8, 8, 0, 8)


def test_a_negative_number_of_queries_is_refused():
    with pytest.raises(ShapeError, match="-3 queries and 8 keys; expected at least 0"):
        kernels.BlockMask.from_predicate(lambda q, k: q >= k, -3, 8, 4, 4)
