"""The reference implementations against loops over single numbers."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than


def attend_one(q, k, v, query, head, *, scale, window, softcap):
    """Compute the attention of one query and head in Python floats."""
    kv_head = head // (q.shape[1] // k.shape[1])
    position = k.shape[0] - q.shape[0] + query
    first = 0 if window is None else max(0, position - window + 1)
    scores = []
    for key in range(first, position + 1):
        dot = sum(float(a) * float(b) for a, b in zip(q[query, head], k[key, kv_head], strict=True))
        score = dot * scale
        scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
    weights = [math.exp(score) for score in scores]
    return [
        sum(w * float(v[first + i, kv_head, d]) for i, w in enumerate(weights)) / sum(weights)
        for d in range(v.shape[2])
    ]


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "window", "softcap"),
    [
        (3, 3, 2, 2, None, None),
        (2, 5, 6, 2, None, None),
        (4, 7, 3, 1, 3, None),
        (4, 4, 2, 1, 1, None),
        (2, 6, 4, 2, None, 1.5),
    ],
    ids=["square", "history and groups", "window", "window of one", "softcap"],
)
def test_attention_equals_loops_over_single_numbers(
    queries, keys, heads, kv_heads, window, softcap
):
    torch.manual_seed(0)
    q = torch.randn(queries, heads, 4)
    k, v = torch.randn(2, keys, kv_heads, 4)

    out = reference.attention(
        q, k, v, softmax_scale=0.7, sliding_window=window, softcap=softcap, dtype=torch.float64
    )

    for query in range(queries):
        for head in range(heads):
            wanted = attend_one(q, k, v, query, head, scale=0.7, window=window, softcap=softcap)
            assert out[query, head].tolist() == pytest.approx(wanted, abs=1e-6)


def test_values_of_one_give_exactly_one():
    q, k = torch.randn(5, 4, 8), torch.randn(9, 2, 8)

    out = reference.attention(q, k, torch.ones(9, 2, 8), softmax_scale=0.5, dtype=torch.float64)

    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-12)


def test_keys_that_no_query_sees_do_not_change_the_output():
    q, (k, v) = torch.randn(2, 4, 8), torch.randn(2, 9, 2, 8)
    # The window of the first query begins with key 5.
    seen = reference.attention(q, k[5:], v[5:], softmax_scale=0.5, sliding_window=3)
    k[:5], v[:5] = torch.nan, torch.inf

    out = reference.attention(q, k, v, softmax_scale=0.5, sliding_window=3)

    # The bits differ on some processors: the order of a library's sums depends on the matrix sizes.
    truth = reference.attention(
        q, k[5:], v[5:], softmax_scale=0.5, sliding_window=3, dtype=torch.float64
    )
    assert_no_worse_than(out, truth, seen, atol=0)


def test_without_causality_every_query_sees_every_key():
    q, (k, v) = torch.randn(2, 2, 4), torch.randn(2, 5, 2, 4)

    out = reference.attention(q, k, v, softmax_scale=0.7, causal=False, dtype=torch.float64)

    alone = reference.attention(q[:1], k, v, softmax_scale=0.7, dtype=torch.float64)
    torch.testing.assert_close(out[:1], alone)


def test_queries_without_visible_keys_give_zeros_and_a_log_sum_exp_of_minus_infinity():
    q, (k, v) = torch.randn(3, 4, 8), torch.randn(2, 2, 2, 8)

    out = reference.attention(q, k, v, softmax_scale=0.5)
    lse = reference.log_sum_exp(q, k, softmax_scale=0.5)

    assert torch.equal(out[0], torch.zeros(4, 8))
    assert torch.equal(lse[0], torch.full((4,), -torch.inf))
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[1:]).all()


def test_the_log_sum_exp_equals_a_loop_over_single_numbers():
    q, k = torch.randn(1, 1, 4), torch.randn(3, 1, 4)

    lse = reference.log_sum_exp(q, k, softmax_scale=0.7, softcap=1.5, dtype=torch.float64)

    scores = [1.5 * math.tanh(0.7 * float(q[0, 0].double() @ key[0].double()) / 1.5) for key in k]
    wanted = math.log(sum(math.exp(score) for score in scores))
    assert lse.tolist() == [[pytest.approx(wanted, abs=1e-6)]]


def test_rms_norm_equals_its_formula_on_single_numbers():
    x, weight = torch.tensor([[3.0, -4.0]]), torch.tensor([2.0, 0.5])

    out = reference.rms_norm(x, weight, eps=0.5)

    scale = 1 / math.sqrt((9 + 16) / 2 + 0.5)
    assert out[0].tolist() == pytest.approx([3 * scale * 2, -4 * scale * 0.5])


def test_rope_rotates_the_pair_half_a_head_apart():
    x = torch.tensor([[[1.0, 10.0, 2.0, 20.0]]])

    out = reference.apply_rope(x, torch.tensor([[0.3, 1.1]]))

    first = complex(1, 2) * complex(math.cos(0.3), math.sin(0.3))
    second = complex(10, 20) * complex(math.cos(1.1), math.sin(1.1))
    assert out[0, 0].tolist() == pytest.approx([first.real, second.real, first.imag, second.imag])


def test_silu_and_mul_gates_the_second_half_by_the_first():
    out = reference.silu_and_mul(torch.tensor([[0.5, -1.0, 3.0, 4.0]]))

    wanted = [0.5 / (1 + math.exp(-0.5)) * 3, -1 / (1 + math.exp(1)) * 4]
    assert out[0].tolist() == pytest.approx(wanted)
