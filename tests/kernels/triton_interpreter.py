"""Loads Triton's interpreter and repairs it: Triton 3.6 does not support NumPy 2.4 and rounds bfloat16 wrongly.

Call `load` before anything else imports Triton, because the environment decides whether a function is interpreted when
the function is decorated; `tests/conftest.py` calls it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import warnings

import pytest
import torch

from tests.kernels import row_products

_VARIABLE = "TRITON_INTERPRET"
_MODULES = (
    "kernels.attention.portable.launch",
    "kernels.attention.training.portable.launch",
    "kernels.attention.portable.cascade_decode",
    "kernels.attention.portable.write_kv",
    "kernels.attention.hopper.fp8.cached_rows",
    "kernels.attention.hopper.fp8.tiles",
    "kernels.attention.portable.part_list",
    "kernels.attention.hopper.work_items",
    "kernels.attention.training.hopper.backward_scratch",
    "kernels.sampling.gpu.best_token",
    "kernels.sampling.gpu.sample_tokens",
    "kernels.norms.gpu.norm_and_gate",
    "kernels.norms.gpu.output_gate",
    "kernels.sampling.gpu.embed",
    "kernels.norms.gpu.quantize_rows",
    "kernels.rope.gpu.rope_cache",
    "kernels.linear.gpu.vector",
    "kernels.linear.gpu.arrange",
    "kernels.linear.gpu.dequantize",
    "kernels.linear.gpu.invariant",
    "kernels.linear.gpu.lora",
    "kernels.collective.one_shot",
    "kernels.recurrent.gpu.divided_norm",
    "kernels.recurrent.gpu.gated_delta",
    "kernels.recurrent.gpu.mamba2",
    "kernels.recurrent.gpu.short_conv",
    "triton.experimental.gluon",  # Triton imports it at the first launch, too late
)


HAS_TRITON = importlib.util.find_spec("triton") is not None
interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or not HAS_TRITON,
    reason="the interpreter needs a host with Triton and without a GPU",
)


def load() -> None:
    """Import Triton and the kernels in interpreted form, unless Triton is already imported.

    The environment is restored afterwards, so that child processes compile.
    """
    if not HAS_TRITON or "triton" in sys.modules:
        return
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        for name in _MODULES:
            importlib.import_module(name)
        _replace_assembly()
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
    _repair()


def is_loaded() -> bool:
    """Return whether the kernels run in the interpreter in this process."""
    module = sys.modules.get("kernels.attention.portable.attention")
    return module is not None and type(module.attention).__name__ == "InterpretedFunction"


@contextlib.contextmanager
def poisoned_memory():
    """Fill the results of `torch.empty`, such as intermediate values of kernels, with NaN and the largest integers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before)


def untouched_memory(shape, dtype):
    """Return an uninitialized tensor that may exceed physical memory; only the pages that are used become real."""
    torch.use_deterministic_algorithms(mode=False)
    try:
        return torch.empty(shape, dtype=dtype)
    finally:
        torch.use_deterministic_algorithms(mode=True)


def huge_cache(num_blocks, *block):
    """Return a paged cache [2, num_blocks, *block] whose value block i has the address of key block i + 1.

    Keys and values thus each pass 2^31 elements in half the memory; use every other block.
    """
    size = math.prod(block)
    memory = untouched_memory(((num_blocks + 1) * size,), torch.bfloat16)
    inner = torch.empty(block, device="meta").stride()
    return memory.as_strided((2, num_blocks, *block), (size, size, *inner))


def _replace_assembly() -> None:
    """Replace the functions written in assembly, which cannot be interpreted, by Triton code."""
    import triton
    import triton.language as tl

    from kernels.attention.portable import tile_fp8 as tile_pairs
    from kernels.gpu import functions as device
    from kernels.recurrent.gpu import (
        gated_delta_blocks,
        gated_delta_drafts,
        gated_delta_step,
        mamba2_step,
    )

    @triton.jit
    def prefetch(addresses):
        pass

    @triton.jit
    def unpack_pairs(pairs):
        bits = pairs.to(tl.int32)
        low, high = (bits & 0xFF).to(tl.uint8), ((bits >> 8) & 0xFF).to(tl.uint8)
        return (
            low.to(tl.float8e4nv, bitcast=True).to(tl.float16),
            high.to(tl.float8e4nv, bitcast=True).to(tl.float16),
        )

    tile_pairs.unpack_pairs = unpack_pairs
    device.prefetch = prefetch
    gated_delta_blocks.fast_silu = device.silu

    @triton.jit
    def product(x, y):
        return x * y

    for module in (gated_delta_drafts, gated_delta_step, mamba2_step):
        module.product = product


def _repair() -> None:
    """Replace wrong or slow parts of the interpreter. Each docstring below says what happens without the repair."""
    import numpy as np
    import triton.language as tl
    from triton.language import semantic
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    convert = builder.create_fp_to_fp
    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store
    cast, launch = builder.cast_impl, interpreter.GridExecutor.__call__
    patch, patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    look_up, reduce = interpreter._get_np_dtype, interpreter.ReduceOps.generic_reduce
    exactly = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    make_block = tl.block_type.__init__
    broadcast_any = semantic.TritonSemantic.broadcast_impl_value
    inside, dtypes, blocks = False, {}, {}
    of_scalar = tl.core.tuple([]), tl.constexpr(1)

    def widen(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def narrow(values):
        bits = values.view(np.uint32)
        nearest_even = ((bits >> 16) & 1) + 0x7FFF
        rounded = ((bits + nearest_even) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)

    def repaired_patch(tensor, scope):
        """A loop with bounds known at run time fails: NumPy 2.4 converts no array of shape [1] to an int."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def repaired_cast(self, src, dst_type):
        """Conversion from float32 to bfloat16 truncates; hardware rounds to nearest even."""
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widen(src.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(narrow(src.data), tl.bfloat16)
        return cast(self, src, dst_type)

    def repaired_dot(self, a, b, d, _input_precision, _max_num_imprecise_acc):
        """Products of bfloat16 values multiply their bit patterns as integers; see `row_products` for the others."""
        assert not any(x.dtype.scalar.is_fp8() for x in (a, b)), "FP8 values are bit patterns too"
        left, right = (
            repaired_cast(self, x, tl.float32) if x.dtype.scalar is tl.bfloat16 else x
            for x in (a, b)
        )
        product = row_products.multiply(
            *(torch.from_numpy(x.data.astype(d.data.dtype, order="C")) for x in (left, right))
        )
        return interpreter.TensorHandle(product.numpy() + d.data, d.dtype.scalar)

    def repaired_load(self, ptrs, mask, *others):
        """Triton 3.9 refuses masks of integers, which a comparison of constants makes of one with it."""
        return masked_load(self, ptrs, as_mask(mask), *others)

    def repaired_store(self, ptrs, value, mask, *others):
        return masked_store(self, ptrs, value, as_mask(mask), *others)

    def as_mask(handle):
        if handle.data.dtype == bool:
            return handle
        return interpreter.TensorHandle(handle.data.astype(bool), tl.int1)

    def repaired_conversion(self, src, dst_type, rounding_mode):
        """A float32 that rounds up to a power of two in FP8 becomes half of that power."""
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.float8e4nv):
            return convert(self, src, dst_type, rounding_mode)
        # The hardware saturates.
        clipped = torch.from_numpy(np.ascontiguousarray(src.data)).clamp(-448, 448)
        bits = clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return interpreter.TensorHandle(bits, tl.float8e4nv)

    def launch_without_warnings(self, *args, **named):
        """NumPy warns of overflows, and of arithmetic on rows that were never written."""
        nonlocal inside
        try:
            with np.errstate(over="ignore", invalid="ignore"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "All-NaN slice")
                return launch(self, *args, **named)
        finally:
            inside = False

    def dtype_of(triton_type):
        """Each operation builds a table of all types, which takes a sixth of the time."""
        scalar = triton_type.scalar
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = look_up(scalar)
        return dtypes[scalar.name]

    def check_overflow(_self, lhs, rhs, operation):
        """Triton checks for overflow with interpreted operations, which takes a third of the time."""
        left, right = lhs.handle.data, rhs.handle.data
        if left.dtype.kind not in "iu" or left.dtype.itemsize == 8:
            return
        exact = exactly[operation.__name__](left.astype(np.int64), right.astype(np.int64))
        limits = np.iinfo(left.dtype)
        assert exact.min() >= limits.min, f"{left.dtype} overflow in {operation.__name__}"
        assert exact.max() <= limits.max, f"{left.dtype} overflow in {operation.__name__}"

    def reduce_halves(self, values):
        """A reduction calls its function for each element, which takes a third of the time of kernels that reduce."""
        if self.axis is None:
            return reduce(self, values)
        parts = [np.moveaxis(value.handle.data, self.axis, 0) for value in values]
        while (length := len(parts[0])) > 1:
            halves = (
                part[at] for at in (slice(length // 2), slice(length // 2, None)) for part in parts
            )
            kinds = [value.dtype for value in values] * 2
            tensors = map(self.to_tensor, halves, kinds)
            results = self.combine_fn.fn(*tensors)
            results = results if isinstance(results, tuple) else (results,)
            parts = [result.handle.data for result in results]
        results = [np.moveaxis(part, 0, self.axis) if self.keep_dims else part[0] for part in parts]
        return [self.to_tensor(x, value.dtype) for x, value in zip(results, values, strict=True)]

    def block_type(self, element_ty, shape):
        """Each operation constructs its type and its shape, which takes a third of the time."""
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.of_tensor = (
                tl.core.tuple([tl.constexpr(n) for n in sizes]),
                tl.constexpr(self.numel),
            )
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor if type.is_block() else of_scalar

    def broadcast(self, lhs, rhs):
        """Shapes of operands are compared number by number, which takes a tenth of the time."""
        both = lhs.type.is_block() and rhs.type.is_block()
        if both and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast_any(self, lhs, rhs)

    def patch_once(fn):
        """Each call of a device function patches the language again, which takes a third of the time."""
        nonlocal inside
        if inside:
            return None
        scope = patch(fn)
        interpreter._patch_builtin(tl.core, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_core(tl.core, scope)
        inside = True
        return scope

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast
    interpreter._patch_lang, interpreter._patch_lang_tensor = patch_once, repaired_patch
    builder.create_masked_load = repaired_load
    builder.create_masked_store = repaired_store
    builder.cast_impl = repaired_cast
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, repaired_cast)
    builder.create_fp_to_fp = repaired_conversion
    builder.create_dot = repaired_dot
    # The interpreter has no `map_elementwise`; the function can be applied to whole arrays.
    tl.map_elementwise = lambda function, *arguments: function(*arguments)
    interpreter.GridExecutor.__call__ = launch_without_warnings
    interpreter._get_np_dtype = dtype_of
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    interpreter.ReduceOps.generic_reduce = reduce_halves
    # Arguments are already on the host; copying them onto themselves would touch all pages of a huge cache.
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
