"""xFormers' signature, layouts and biases give what its own definition of the biases gives."""

from __future__ import annotations

import importlib
import itertools
import logging

import pytest
import torch
from torch.nn import functional

import kernels
from kernels.attention.training import memory_efficient
from kernels.errors import ShapeError
from tests.kernels.attention.xformers_biases import bias, seqinfo, spaced

TABLES = torch.tensor([[2, 0], [3, 1], [5, 4]], dtype=torch.int32)  # pages of 8 keys


def visible(shape, corner=None, window=None):
    """Return which keys the queries of a sequence see, [M, N] bool."""
    num_q, num_k = shape
    shift = num_k - num_q if corner == "bottom" else 0
    distance = torch.arange(num_q)[:, None] + shift - torch.arange(num_k)
    seen = torch.ones(shape, dtype=torch.bool)
    if corner:
        seen &= distance >= 0
    if window:
        seen &= distance < window
    return seen


def packed(queries, rows, num_rows, **rule):
    """Return which of all rows of keys the packed queries see; `rows` are those of each sequence, in its order."""
    seen = torch.zeros(sum(queries), num_rows, dtype=torch.bool)
    starts = itertools.accumulate(queries, initial=0)
    for start, num_q, keys in zip(starts, queries, rows, strict=False):
        for place, key in enumerate(keys):
            seen[start : start + num_q, key] = visible((num_q, len(keys)), **rule)[:, place]
    return seen


def paged(ranges):
    return [[int(TABLES[i, at // 8]) * 8 + at % 8 for at in it] for i, it in enumerate(ranges)]


Q, K = [3, 5, 2], [4, 9, 2]
ENDS = [range(4), range(4, 13), range(13, 15)]
GAPS = [range(1, 5), range(6, 15), range(16, 18)]
BLOCKS = {"q_seqinfo": seqinfo(Q), "k_seqinfo": seqinfo(K)}
GAPPY = {"q_seqinfo": seqinfo(Q), "k_seqinfo": spaced([1, 6, 16, 20], K)}
PADDED = {"q_seqinfo": seqinfo(Q), "k_seqinfo": spaced([0, 10, 20, 30], K)}
PADS = [range(4), range(10, 19), range(20, 22)]
PAGED = {
    "q_seqinfo": seqinfo(Q), "k_seqinfo": spaced([0, 16, 32, 48], K), "block_tables": TABLES, "page_size": 8,
}  # fmt: skip
PAGED_GAPPY = PAGED | {"k_seqinfo": spaced([2, 5, 1, -1], [6, 14, 3])}
PAGES = paged([range(4), range(9), range(2)])
GAPPY_PAGES = paged([range(2, 6), range(5, 14), range(1, 3)])
SEQUENCES = [
    (bias("BlockDiagonalMask", **BLOCKS), packed(Q, ENDS, 15)),
    (bias("BlockDiagonalCausalMask", **BLOCKS), packed(Q, ENDS, 15, corner="top")),
    (bias("BlockDiagonalCausalFromBottomRightMask", **BLOCKS), packed(Q, ENDS, 15, corner="bottom")),
    (
        bias("BlockDiagonalCausalLocalAttentionMask", **BLOCKS, _window_size=2),
        packed(Q, ENDS, 15, corner="top", window=2),
    ),
    (
        bias("BlockDiagonalCausalLocalAttentionFromBottomRightMask", **BLOCKS, _window_size=3),
        packed(Q, ENDS, 15, corner="bottom", window=3),
    ),
    (bias("BlockDiagonalPaddedKeysMask", **PADDED), packed(Q, PADS, 30)),
    (bias("BlockDiagonalCausalWithOffsetPaddedKeysMask", **PADDED), packed(Q, PADS, 30, corner="bottom")),
    (
        bias("BlockDiagonalCausalLocalAttentionPaddedKeysMask", **PADDED, _window_size=2),
        packed(Q, PADS, 30, corner="bottom", window=2),
    ),
    (
        bias("BlockDiagonalLocalAttentionPaddedKeysMask", **PADDED, window_left=3, window_right=0),
        packed(Q, PADS, 30, corner="bottom", window=4),
    ),
    (bias("BlockDiagonalGappyKeysMask", **GAPPY), packed(Q, GAPS, 20)),
    (bias("BlockDiagonalCausalWithOffsetGappyKeysMask", **GAPPY), packed(Q, GAPS, 20, corner="bottom")),
    (bias("PagedBlockDiagonalPaddedKeysMask", **PAGED), packed(Q, PAGES, 48)),
    (bias("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", **PAGED), packed(Q, PAGES, 48, corner="bottom")),
    (bias("PagedBlockDiagonalGappyKeysMask", **PAGED_GAPPY), packed(Q, GAPPY_PAGES, 48)),
    (
        bias("PagedBlockDiagonalCausalWithOffsetGappyKeysMask", **PAGED_GAPPY),
        packed(Q, GAPPY_PAGES, 48, corner="bottom"),
    ),
]  # fmt: skip
BATCHES = [
    (None, {}, 9),
    (bias("LowerTriangularMask"), {"corner": "top"}, 9),
    (bias("LowerTriangularFromBottomRightMask"), {"corner": "bottom"}, 9),
    (bias("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=3), {"corner": "bottom", "window": 3}, 9),
    (bias("LocalAttentionFromBottomRightMask", window_left=2, window_right=0), {"corner": "bottom", "window": 3}, 9),
]  # fmt: skip


def by_type(case):
    return type(case).__name__ if not isinstance(case, (dict, int, torch.Tensor)) else ""


def results(compute, tensors):
    """Return the result and the gradients of the tensors."""
    inputs = [it.detach().clone().requires_grad_() for it in tensors]
    out = compute(*inputs)
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    return [out.detach(), *(it.grad for it in inputs)]


def definition(seen):
    """Return attention in PyTorch with a mask, [M, N] bool, for tensors [B, M, H, K]."""

    def compute(*tensors):
        q, k, v = (it.transpose(1, 2) for it in tensors)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)

    return compute


def tensors(batch, num_q, num_k, *inner, value_dim=16):
    torch.manual_seed(0)
    return [
        torch.randn(batch, num_q, *inner, 16),
        torch.randn(batch, num_k, *inner, 16),
        torch.randn(batch, num_k, *inner, value_dim),
    ]


def assert_same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("attn_bias", "seen"), SEQUENCES, ids=by_type)
def test_a_bias_of_packed_sequences_gives_its_definition(attn_bias, seen):
    inputs = tensors(1, *seen.shape, 2)

    assert_same(
        results(lambda *x: kernels.memory_efficient_attention(*x, attn_bias), inputs),
        results(definition(seen), inputs),
    )


@pytest.mark.parametrize(("attn_bias", "rule", "num_k"), BATCHES, ids=by_type)
def test_a_bias_of_a_batch_gives_its_definition(attn_bias, rule, num_k):
    inputs = tensors(3, 6, num_k, 2)

    assert_same(
        results(lambda *x: kernels.memory_efficient_attention(*x, attn_bias), inputs),
        results(definition(visible((6, num_k), **rule)), inputs),
    )


def test_every_supported_type_has_a_test():
    tested = {type(it[0]).__name__ for it in (*SEQUENCES, *BATCHES)} - {"NoneType"}

    assert tested == set(memory_efficient._BIASES)


@pytest.mark.parametrize("value_dim", [8, 24])
def test_the_head_dim_of_the_values_may_differ(value_dim):
    inputs = tensors(2, 6, 9, 2, value_dim=value_dim)

    assert_same(
        results(kernels.memory_efficient_attention, inputs), results(definition(None), inputs)
    )


def test_tensors_without_heads_have_one():
    inputs = tensors(2, 6, 9)

    assert_same(
        results(kernels.memory_efficient_attention, inputs),
        results(functional.scaled_dot_product_attention, inputs),
    )


@pytest.mark.parametrize("expanded", [True, False])
def test_groups_of_heads_share_expanded_keys(expanded, monkeypatch):
    q, _, _ = tensors(2, 6, 9, 2, 3)
    _, k, v = tensors(2, 6, 9, 2, 1)
    heads = []
    compute = memory_efficient.flash_attention
    monkeypatch.setattr(
        memory_efficient,
        "flash_attention",
        lambda *x, **options: (heads.append(x[1].shape[-2]), compute(*x, **options))[1],
    )

    def ours(q, k, v):
        k, v = (it.expand(2, 9, 2, 3, 16) for it in (k, v))
        if not expanded:
            k, v = k.contiguous(), v.contiguous()
        return kernels.memory_efficient_attention(q, k, v)

    def theirs(q, k, v):
        return definition(None)(
            q.flatten(2, 3), *(it.expand(2, 9, 2, 3, 16).flatten(2, 3) for it in (k, v))
        ).view(q.shape)

    assert_same(results(ours, (q, k, v)), results(theirs, (q, k, v)))
    assert heads == [2 if expanded else 6]


def test_a_leaf_of_expanded_keys_gets_the_gradient_of_each_head():
    q, _, _ = tensors(1, 6, 9, 2, 3)
    _, k, v = tensors(1, 6, 9, 2, 1)
    grads = []
    for copy in (False, True):
        leaves = [it.expand(1, 9, 2, 3, 16) for it in (k, v)]
        leaves = [(it.contiguous() if copy else it).requires_grad_() for it in leaves]
        kernels.memory_efficient_attention(q, *leaves).square().sum().backward()
        grads.append([it.grad for it in leaves])

    assert_same(*grads)


def test_a_tensor_as_bias_is_computed_by_pytorch_which_the_log_says(caplog, monkeypatch):
    monkeypatch.setattr("kernels.attention.training.drop_in._logged", set())
    q, k, v = tensors(2, 6, 9, 3)
    added = torch.randn(2, 3, 6, 9)

    def theirs(q, k, v, added):
        q, k, v = (it.transpose(1, 2) for it in (q, k, v))
        return ((q @ k.mT / 4 + added).softmax(-1) @ v).transpose(1, 2)

    with caplog.at_level(logging.INFO, "kernels.attention.training.drop_in"):
        found = results(kernels.memory_efficient_attention, (q, k, v, added))

    assert_same(found, results(theirs, (q, k, v, added)))
    assert caplog.messages == ["PyTorch computes memory_efficient_attention: a tensor as attn_bias"]


def test_dropout_is_seeded_by_pytorchs_generator():
    inputs = tensors(1, 60, 60, 1)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(kernels.memory_efficient_attention(*inputs, p=0.5))

    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("attn_bias", "words"),
    [
        (bias("LowerTriangularMaskWithTensorBias"), "is a LowerTriangularMaskWithTensorBias; supported are None"),
        (bias("MyMask"), "is a MyMask; supported are None"),
        (bias("BlockDiagonalMask"), "without the attributes of xFormers 0.0.35: .*q_seqinfo"),
        (bias("LocalAttentionFromBottomRightMask", window_left=1, window_right=2), "window_right 2; only 0"),
        (bias("BlockDiagonalMask", q_seqinfo=seqinfo([5]), k_seqinfo=seqinfo([9])), "with 5 queries; query has 6"),
        (bias("BlockDiagonalMask", q_seqinfo=seqinfo([6]), k_seqinfo=seqinfo([10])), "keys 0 to 10; key has 9"),
        (
            bias("BlockDiagonalMask", q_seqinfo=seqinfo([2, 4]), k_seqinfo=seqinfo([3, 3, 3])),
            "with 2 sequences of queries and 3 of keys",
        ),
        (
            bias("BlockDiagonalPaddedKeysMask", q_seqinfo=seqinfo([6]), k_seqinfo=spaced([-3], [5])),
            "keys -3 to 2; key has 9",
        ),
        (
            bias("PagedBlockDiagonalPaddedKeysMask", q_seqinfo=seqinfo([6]), k_seqinfo=spaced([0], [9]),
                 block_tables=torch.tensor([[2]]), page_size=8),
            "block_tables has 1 pages of 8 keys",
        ),
        (
            bias("PagedBlockDiagonalPaddedKeysMask", q_seqinfo=seqinfo([6]), k_seqinfo=spaced([0], [8]),
                 block_tables=torch.tensor([[2]]), page_size=8),
            "lead to key 23; key has 9",
        ),
        (
            bias("PagedBlockDiagonalPaddedKeysMask", q_seqinfo=seqinfo([6]), k_seqinfo=spaced([0], [8]),
                 block_tables=torch.tensor([[-1]]), page_size=8),
            "lead to key -1; key has 9",
        ),
        (
            bias("PagedBlockDiagonalPaddedKeysMask", q_seqinfo=seqinfo([6]), k_seqinfo=spaced([0], [8]),
                 block_tables=torch.tensor([[0], [1]]), page_size=8),
            "block_tables of 2 sequences; it has 1",
        ),
        (torch.zeros(6, 9), r"expected numbers to add, \[B, H, M, N\] = \[1, 2, 6, 9\] on cpu"),
        (torch.ones(1, 2, 6, 9, dtype=torch.bool), "torch.bool .* expected numbers to add"),
        (torch.zeros(1, 2, 6, 9, device="meta"), "expected numbers to add"),
    ],
)  # fmt: skip
def test_an_unsupported_bias_is_refused(attn_bias, words):
    with pytest.raises(ShapeError, match=words):
        kernels.memory_efficient_attention(*tensors(1, 6, 9, 2), attn_bias)


def test_more_queries_than_keys_from_the_top_left_are_refused():
    with pytest.raises(ShapeError, match="with 9 queries on 6 keys"):
        kernels.memory_efficient_attention(*tensors(1, 9, 6, 2), bias("LowerTriangularMask"))


def test_packed_sequences_in_a_batch_are_refused():
    attn_bias = bias("BlockDiagonalMask", q_seqinfo=seqinfo([6]), k_seqinfo=seqinfo([9]))

    with pytest.raises(ShapeError, match="the batches are 2 and 2; expected 1"):
        kernels.memory_efficient_attention(*tensors(2, 6, 9, 2), attn_bias)


@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 6), (1, 9), (1, 9)),
        ((1, 6, 2, 8), (1, 9, 2, 8), (1, 9, 8)),
        ((1, 6, 4, 8), (1, 9, 2, 8), (1, 9, 2, 8)),
        ((1, 6, 2, 8), (1, 9, 2, 4), (1, 9, 2, 8)),
        ((1, 6, 2, 8), (1, 9, 2, 8), (1, 8, 2, 8)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes):
    with pytest.raises(ShapeError, match="expected"):
        kernels.memory_efficient_attention(*map(torch.zeros, shapes))


def xformers_cases():
    """Yield xFormers' own biases, and the lengths of queries and keys."""
    theirs = pytest.importorskip(
        "xformers.ops.fmha.attn_bias", reason="xFormers is not installed", exc_type=ImportError
    )
    cpu, keys = {"device": torch.device("cpu")}, [4, 9, 2]
    block = theirs.BlockDiagonalMask.from_seqlens(Q, keys, **cpu)
    yield theirs.LowerTriangularMask(), 6, 9
    yield theirs.LowerTriangularFromBottomRightMask(), 6, 9
    yield theirs.LowerTriangularFromBottomRightMask().make_local_attention(3), 6, 9
    yield theirs.LocalAttentionFromBottomRightMask(window_left=2, window_right=0), 6, 9
    yield block, 10, 15
    yield block.make_causal(), 10, 15
    yield block.make_causal_from_bottomright(), 10, 15
    yield block.make_local_attention(2), 10, 15
    yield block.make_local_attention_from_bottomright(3), 10, 15
    padded = theirs.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 10, keys, **cpu)
    yield padded, 10, 30
    yield (
        theirs.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 10, keys, **cpu),
        10,
        30,
    )
    local = theirs.BlockDiagonalCausalLocalAttentionPaddedKeysMask
    yield local.from_seqlens_local(Q, 10, keys, 2), 10, 30
    local = theirs.BlockDiagonalLocalAttentionPaddedKeysMask
    yield local.from_seqlens_local(Q, 10, keys, 3, 0), 10, 30
    for kind in (
        theirs.BlockDiagonalGappyKeysMask,
        theirs.BlockDiagonalCausalWithOffsetGappyKeysMask,
    ):
        yield kind.from_seqlens(Q, [1, 6, 16, 20], keys, **cpu), 10, 20
    tables = {"block_tables": TABLES, "page_size": 8}
    yield padded.make_paged(**tables, paged_type=theirs.PagedBlockDiagonalPaddedKeysMask), 10, 48
    kind = theirs.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    yield kind.from_seqlens(Q, keys, **tables, **cpu), 10, 48
    gappy = theirs.BlockDiagonalGappyKeysMask.from_seqlens(Q, [2, 21, 33, 48], keys, **cpu)
    for kind in (
        theirs.PagedBlockDiagonalGappyKeysMask,
        theirs.PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    ):
        yield gappy.make_paged(TABLES, 8, 16, kind), 10, 48


def test_xformers_own_biases_give_what_they_materialize():
    for attn_bias, num_q, num_k in xformers_cases():
        inputs = tensors(1, num_q, num_k, 2)
        added = attn_bias.materialize((num_q, num_k))
        seen = added[:, :num_k] == 0

        assert_same(
            results(lambda *x, it=attn_bias: kernels.memory_efficient_attention(*x, it), inputs),
            results(definition(seen), inputs),
        )


def test_xformers_has_no_other_masks_than_those_named_here():
    theirs = pytest.importorskip(
        "xformers.ops.fmha.attn_bias", reason="xFormers is not installed", exc_type=ImportError
    )
    names = {
        name
        for name, it in vars(importlib.import_module(theirs.__name__)).items()
        if isinstance(it, type) and issubclass(it, theirs.AttentionBias)
    }

    assert (
        names - set(memory_efficient._BIASES)
        == {
            "AttentionBias",
            "AttentionBiasSubTensor",
            "LowerTriangularMaskWithTensorBias",
        }
        & names
    )
