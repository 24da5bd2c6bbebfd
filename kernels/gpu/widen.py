"""Conversion of float8_e4m3fn to bfloat16 or float16 in Gluon: exact, but NaN becomes 480.

The instruction that converts to float16 is followed by one for each number to bfloat16, at a quarter of the rate. The
bits of the formats differ in their place and in the exponent's bias alone, so six instructions convert two numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _assembly(dtype):
    """Return the assembly of `widen`: a shift, and a product with the quotient of the two formats' scales.

    A product of bfloat16 needs sm_90, a product to which -0 is added sm_80.
    """
    if dtype == gl.bfloat16:
        shift, numbers, kind, factor = 4, "0x07f007f0", "bf16x2", "0x7b807b80"  # 2^120
    else:
        shift, numbers, kind, factor = 1, "0x3f803f80", "f16x2", "0x5c005c00"  # 2^8
    return f"""{{
        .reg .b32 pair, low, factor, minus;
        cvt.u32.u16 pair, $1;
        prmt.b32 pair, pair, 0, 0x1404;
        shr.u32 low, pair, {shift};
        and.b32 low, low, {numbers};
        lop3.b32 low, pair, 0x80008000, low, 0xea;
        mov.b32 factor, {factor};
        mov.b32 minus, 0x80008000;
        fma.rn.{kind} $0, low, factor, minus;
    }}"""


@gluon.jit
def widen(numbers, dtype: gl.constexpr):
    """Convert numbers to bfloat16 or float16.

    Calls stay in their order among waits for products, which may still read the registers of earlier results.
    """
    assembly: gl.constexpr = _assembly(dtype)
    return gl.inline_asm_elementwise(
        assembly, "=r,h", [numbers], dtype=dtype.value, is_pure=False, pack=2
    )
