"""Dense causal attention: values, gradients, shapes."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.errors import ShapeError
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than, truth_dtype


def reference_batch(q, k, v, window, dtype):
    return torch.stack(
        [
            reference.attention(
                q[b], k[b], v[b], softmax_scale=0.3, sliding_window=window, dtype=dtype
            )
            for b in range(q.shape[0])
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_values_and_gradients_agree_with_the_reference(dtype, heads, kv_heads, window, length):
    torch.manual_seed(0)
    # Sampled in float32: the numbers that a seed gives in another dtype differ between PyTorch versions.
    q = torch.randn(2, length, heads, 16).to(dtype)
    k, v = torch.randn(2, 2, length, kv_heads, 16).to(dtype)
    grad = torch.randn(2, length, heads, 16).to(dtype)
    results = []
    for compute in (None, truth_dtype(dtype), dtype):
        inputs = [x.detach().clone().to(compute or dtype).requires_grad_() for x in (q, k, v)]
        if compute is None:
            out = kernels.flash_attention(*inputs, 0.3, window)
        else:
            out = reference_batch(*inputs, window, compute)
        out.backward(grad.to(out.dtype))
        results.append([out.detach(), *(x.grad for x in inputs)])

    # With a window of 1 plain bfloat16 is exact per head, and only the sum over heads is rounded.
    atol = 0.02 if dtype is torch.bfloat16 else 1e-5
    for actual, truth, same in zip(*results, strict=True):
        assert_no_worse_than(actual, truth, same, atol=atol)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 5, 4, 8), (2, 5, 3, 8), (2, 5, 3, 8)),
        ((2, 5, 4, 8), (3, 5, 2, 8), (3, 5, 2, 8)),
        ((2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 4, 8)),
        ((2, 5, 4, 8), (2, 5, 2, 9), (2, 5, 2, 9)),
        ((5, 4, 8), (5, 2, 8), (5, 2, 8)),
    ],
    ids=["heads", "batch", "values", "head dim", "dims"],
)
def test_inconsistent_shapes_are_rejected(q, k, v):
    with pytest.raises(ShapeError, match="expected q"):
        kernels.flash_attention(torch.empty(q), torch.empty(k), torch.empty(v), 0.3)
