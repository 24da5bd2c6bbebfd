"""The bit operations that convert FP8 to wider formats, on a CPU for all 256 codes."""

import re

import pytest
import torch

from tests.kernels.triton_interpreter import HAS_TRITON

if HAS_TRITON:
    from triton.experimental.gluon import language as gl

    from kernels.gpu import widen

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_assembly_converts_every_number_exactly_and_nan_to_480(dtype):
    assembly = widen._assembly.fn(getattr(gl, str(dtype).removeprefix("torch.")))

    def operand(pattern):
        """Return the number in a line of the assembly; of two halves, which are equal, the lower one."""
        found = re.search(pattern, assembly)
        assert found, pattern
        number = int(found.group(1), 0)
        assert number < 1 << 16 or number >> 16 == number & 0xFFFF
        return number & 0xFFFF

    codes = torch.arange(256, dtype=torch.uint8)
    # A byte becomes the upper half of 16 bits.
    assert "prmt.b32 pair, pair, 0, 0x1404;" in assembly
    pair = codes.int() << 8
    low = (pair >> operand(r"shr\.u32 low, pair, (\d+);")) & operand(r"and\.b32 low, low, (\w+);")
    # 0xea is (a & b) | c.
    bits = (pair & operand(r"lop3\.b32 low, pair, (\w+), low, 0xea;")) | low
    factor = torch.tensor(operand(r"mov\.b32 factor, (\w+);"), dtype=torch.int16).view(dtype)
    found = bits.to(torch.int16).view(dtype) * factor

    expected = codes.view(torch.float8_e4m3fn).to(dtype)
    expected[[0x7F, 0xFF]] = torch.tensor([480.0, -480.0], dtype=dtype)
    assert torch.equal(found, expected)
