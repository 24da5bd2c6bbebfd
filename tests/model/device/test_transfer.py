"""Arrays that are packed for a transfer unpack unchanged."""

import numpy as np
import pytest
import torch

from model.device.transfer import pack, unpack, upload

ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.arange(7, dtype=np.int32),
    np.empty(0, dtype=np.int64),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.empty((0, 3), dtype=np.float64),
    np.linspace(0, 1, 3),
]


def packed():
    buffer = torch.full((256,), 255, dtype=torch.uint8)
    pack(ARRAYS, buffer)
    return unpack(ARRAYS, buffer)


@pytest.mark.parametrize("tensors", [packed(), upload(ARRAYS, torch.device("cpu"))])
def test_arrays_keep_their_values_shapes_and_dtypes(tensors):
    assert len(tensors) == len(ARRAYS)
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array, strict=True)


def test_every_array_begins_at_a_multiple_of_16_bytes():
    # Triton compiles a kernel again for pointers with another alignment.
    first = packed()[0].data_ptr()

    assert all((tensor.data_ptr() - first) % 16 == 0 for tensor in packed() if tensor.numel())
