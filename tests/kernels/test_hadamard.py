"""The rotation of heads over an FP8 cache: it keeps scores, and spreads outliers."""

import pytest
import torch

from kernels.hadamard import hadamard_matrix, hadamard_transform, mixed_elements

CPU = torch.device("cpu")
HEAD_DIMS = [16, 32, 64, 80, 96, 128, 192, 256]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_matrix_is_orthogonal_so_scores_do_not_change(head_dim):
    matrix = hadamard_matrix(head_dim, torch.float64, CPU)
    q, k = torch.randn(2, 5, head_dim, dtype=torch.float64)

    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64))
    torch.testing.assert_close(hadamard_transform(q) @ hadamard_transform(k).T, q @ k.T)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_each_outlier_is_spread_over_all_elements_that_it_is_mixed_with(head_dim):
    mixed = 2 * mixed_elements(head_dim)
    size = hadamard_transform(torch.eye(head_dim)).abs()

    assert bool(((size > 0).sum(-1) == mixed).all())
    torch.testing.assert_close(size[size > 0], torch.full((head_dim * mixed,), mixed**-0.5))


@pytest.mark.parametrize("head_dim", HEAD_DIMS[1:])
def test_regular_heads_do_not_become_outliers(head_dim):
    ones = torch.ones(head_dim)
    alternating, halves = ones.clone(), ones.clone()
    alternating[1::2] = -1
    halves[head_dim // 2 :] = -1

    found = hadamard_transform(torch.stack([ones, alternating, halves])).abs().amax()

    assert found <= 0.5 * (2 * mixed_elements(head_dim)) ** 0.5 + 1e-5


def test_half_precision_is_rounded_once():
    x = torch.randn(7, 3, 64).bfloat16()

    assert torch.equal(hadamard_transform(x), hadamard_transform(x.float()).bfloat16())
