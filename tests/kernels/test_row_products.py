import pytest
import torch

from tests.kernels import row_products
from tests.kernels.references.problems import assert_no_worse_than


@pytest.mark.parametrize(("rows", "inner", "columns"), [(64, 64, 64), (16, 128, 32), (37, 16, 8)])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_a_row_has_the_same_bits_among_any_others(rows, inner, columns, transposed):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator)
    right = torch.randn(inner, columns, generator=generator)
    right = right.T.contiguous().T if transposed else right
    whole = row_products.multiply(left, right)

    assert_no_worse_than(whole, left.double() @ right.double(), left @ right)
    for first, stop in ((0, 1), (3, 4), (5, rows), (1, 14)):
        assert torch.equal(row_products.multiply(left[first:stop], right), whole[first:stop])
