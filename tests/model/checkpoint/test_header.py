"""The dtype in the header of a file of weights, which may be damaged."""

import json

import pytest

from model.checkpoint.files.header import stored_dtype

WHOLE = {
    "a": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
    "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
}


def write(folder, header):
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def test_the_dtype_is_that_of_most_floats(tmp_path):
    assert stored_dtype(tmp_path) is None
    write(tmp_path, json.dumps(WHOLE).encode())

    assert stored_dtype(tmp_path) == "bfloat16"


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"{\xc1}", b"[]", b'{"a": 1}', b'{"a":' * 100_000, b'{"a": {"b": "\xff"}}'],
    ids=lambda it: repr(it[:20]),
)
def test_a_damaged_header_has_none(tmp_path, header):
    write(tmp_path, header)

    assert stored_dtype(tmp_path) is None
