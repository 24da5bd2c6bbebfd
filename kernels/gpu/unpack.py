"""Conversion of packed 4-bit numbers to bfloat16 or float16 in Gluon.

The bits of a number become the last ones of a fraction. `unpack` leaves what the exponent adds to the caller, and takes
seven instructions for eight numbers. In bfloat16 the exponent is that of 128, so its result is the number plus 128;
float16 has subnormal numbers, which products read exactly, so its result is the number times 2^-24.

`dequantize` returns weights, in 15 instructions for eight. It subtracts 128, in float16 1024, and the offset, which is
exact. The product with the scale and the sum with the shift are rounded to the dtype once, as are scale and shift
before.

A thread has four adjacent bytes at a time. Of these, a result has bytes 0, 2, 1 and 3: so shifts alone place the bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _assembly(word, bits):
    """Return the assembly that writes the numbers of a word to registers 0 to 3, with other bits set."""
    return f"""
        .reg .b32 next;
        lop3.b32 $0, {word}, 0x000f000f, {bits}, 0xea;
        shr.u32 next, {word}, 8;
        lop3.b32 $1, next, 0x000f000f, {bits}, 0xea;
        shr.u32 next, {word}, 4;
        lop3.b32 $2, next, 0x000f000f, {bits}, 0xea;
        shr.u32 next, {word}, 12;
        lop3.b32 $3, next, 0x000f000f, {bits}, 0xea;
    """


@gluon.constexpr_function
def number_bias(dtype):
    """Return what `unpack` adds to a number."""
    return 128.0 if dtype == gl.bfloat16 else 0.0


@gluon.constexpr_function
def number_unit(dtype):
    """Return the number of which the result of `unpack`, less the bias, is 1."""
    return 1.0 if dtype == gl.bfloat16 else 2.0**24


@gluon.constexpr_function
def _unpacking(dtype):
    return "{" + _assembly("$4", "0x43004300" if dtype == gl.bfloat16 else "0") + "}"


@gluon.jit
def unpack(numbers, dtype: gl.constexpr):
    """Convert uint8 with two numbers each to two tensors: the numbers of the lower and of the upper halves."""
    assembly: gl.constexpr = _unpacking(dtype)
    return gl.inline_asm_elementwise(
        assembly,
        "=&r,=&r,=&r,=&r,r",
        [numbers],
        dtype=(dtype.value, dtype.value),
        is_pure=True,
        pack=4,
    )


@gluon.constexpr_function
def _dequantizing(dtype, offset, shifted):
    """Return the assembly of `dequantize`: of a word, a scale and a shift, the latter two of each of four bytes."""
    if dtype == gl.bfloat16:
        kind, bits, one, zero = (
            "bf16x2",
            0x4300,
            0x3F80,
            0xC300 + offset,
        )  # 128, 1 and -128 - offset
    else:
        kind, bits, one, zero = (
            "f16x2",
            0x6400,
            0x3C00,
            0xE400 + offset,
        )  # 1024, 1 and -1024 - offset
    assembly = _assembly("$4", hex(bits << 16 | bits)) + ".reg .b32 one, zero, minus;"
    for name, number in (("one", one), ("zero", zero), ("minus", 0x8000)):
        assembly += f"mov.b32 {name}, {hex(number << 16 | number)};"
    added = "$9" if shifted else "minus"
    for i in range(4):
        assembly += f"fma.rn.{kind} ${i}, ${i}, one, zero; fma.rn.{kind} ${i}, ${i}, $5, {added};"
    return "{" + assembly + "}"


@gluon.jit
def dequantize(
    numbers, scale, shift, dtype: gl.constexpr, OFFSET: gl.constexpr, SHIFTED: gl.constexpr
):
    """Convert uint8 with two numbers each to two tensors of weights, those of the lower and upper halves.

    Calls stay in their order among waits for products, which may still read the registers of earlier results.

    Args:
        numbers: any shape.
        scale: of each byte, twice in an int32; equal in the four adjacent bytes of a thread. So is `shift`.
        shift: where SHIFTED.
        dtype: of the weights.
        OFFSET: subtracted from a number.
        SHIFTED: whether a shift is added.
    """
    assembly: gl.constexpr = _dequantizing(dtype, OFFSET, SHIFTED)
    return gl.inline_asm_elementwise(
        assembly,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [numbers, scale, shift],
        dtype=(dtype.value, dtype.value),
        is_pure=False,
        pack=4,
    )


@gluon.jit
def twice(scale, dtype: gl.constexpr):
    """Round numbers to a dtype of 16 bits, and return its bits twice in an int32."""
    bits = scale.to(gl.float32).to(dtype).to(gl.uint16, bitcast=True).to(gl.uint32)
    return (bits | (bits << 16)).to(gl.int32, bitcast=True)
