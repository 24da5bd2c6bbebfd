"""The attention kernels as rows of data, most preferred first.

A new kernel is a row here and a file in `kernels/attention/`. Nothing else decides what runs where.
"""

from __future__ import annotations

from kernels.attention.problem import DTYPES, LaunchConfig, Phase
from kernels.attention.quantized_cache import FP8, QuantisedCache
from kernels.attention.spec import KernelSpec

_ANY_GPU = (0, 999)
_AMPERE_ON = (80, 129)
_HOPPER = (90, 90)
_NO_WGMMA = "wgmma and setmaxnreg are Hopper's"
_NO_TENSOR_CORES = "Triton's dot uses tensor cores from sm_80 on"
_HEAD_DIMS = frozenset({32, 64, 80, 96, 128, 192, 256})
_POWERS_OF_TWO = frozenset({1, 2, 4, 8, 16, 32, 64})
_UP_TO_64_HEADS = frozenset(range(1, 65))
_NEARLY_POWERS_OF_TWO = frozenset(
    heads for heads in _UP_TO_64_HEADS if 8 * heads >= 7 * (1 << (heads - 1).bit_length())
)
"""A token's heads take a power of two of a tile's rows: with more than an eighth of them unused, the portable
kernel is as fast."""
_FP8_BY_TRITON = QuantisedCache(
    kv_dtypes=frozenset({FP8}),
    dtypes=frozenset({"bfloat16", "float16"}),
    first_sm=89,
    note="older ones have no instruction that converts it",
)
_FP8_BY_PYTORCH = QuantisedCache(kv_dtypes=frozenset({FP8}), dtypes=frozenset(DTYPES))

REGISTRY: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="hopper_fp8_prefill",
        phase=Phase.PREFILL,
        target="kernels.attention.hopper.fp8_prefill:HopperFP8Prefill",
        dtypes=frozenset({"bfloat16", "float16"}),
        sm=_HOPPER,
        head_dims=frozenset({128}),
        paged=False,
        group_sizes=_POWERS_OF_TWO,
        packed=True,
        sliding_window=False,
        softcap=False,
        non_causal=True,
        lse=True,
        batch_invariant=True,
        fp8=True,
        persistent=True,
        row_tiles=frozenset({128}),
        launch=LaunchConfig(block_m=128, block_n=128, num_warps=4, num_stages=2),
        note="multiplies in FP8, as the problem allows",
        arch_note=_NO_WGMMA,
    ),
    KernelSpec(
        name="hopper_prefill",
        phase=Phase.PREFILL,
        target="kernels.attention.hopper.prefill:HopperPrefill",
        dtypes=frozenset({"bfloat16", "float16"}),
        sm=_HOPPER,
        head_dims=frozenset({64, 128, 256}),
        block_sizes=(16, 256),
        power_of_two_blocks=True,
        group_sizes=_NEARLY_POWERS_OF_TWO,
        packed=True,
        non_causal=True,
        lse=True,
        batch_invariant=True,
        persistent=True,
        row_tiles=frozenset({128, 192}),
        launch=LaunchConfig(block_m=128, block_n=64, num_warps=4, num_stages=2),
        arch_note=_NO_WGMMA,
    ),
    KernelSpec(
        name="portable_prefill",
        phase=Phase.PREFILL,
        target="kernels.attention.portable.prefill:PortablePrefill",
        dtypes=frozenset(DTYPES),
        sm=_AMPERE_ON,
        head_dims=_HEAD_DIMS,
        block_sizes=(1, 256),
        packed=True,
        non_causal=True,
        lse=True,
        batch_invariant=True,
        quantised=_FP8_BY_TRITON,
        launch=LaunchConfig(block_m=32, block_n=32, num_warps=4, num_stages=1),
        arch_note=_NO_TENSOR_CORES,
    ),
    KernelSpec(
        name="hopper_decode",
        phase=Phase.DECODE,
        target="kernels.attention.hopper.decode:HopperDecode",
        dtypes=frozenset({"bfloat16", "float16"}),
        sm=_HOPPER,
        head_dims=frozenset({64, 128, 256}),
        block_sizes=(16, 256),
        power_of_two_blocks=True,
        group_sizes=_UP_TO_64_HEADS,
        several_queries=True,
        lse=True,
        batch_invariant=True,
        row_tiles=frozenset({64}),
        launch=LaunchConfig(block_m=64, block_n=32, num_warps=4, num_stages=2, programs_per_sm=2),
        arch_note=_NO_WGMMA,
    ),
    KernelSpec(
        name="portable_decode",
        phase=Phase.DECODE,
        target="kernels.attention.portable.decode:PortableDecode",
        dtypes=frozenset(DTYPES),
        sm=_AMPERE_ON,
        head_dims=_HEAD_DIMS,
        block_sizes=(1, 256),
        several_queries=True,
        lse=True,
        batch_invariant=True,
        quantised=_FP8_BY_TRITON,
        launch=LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=1, programs_per_sm=2),
        arch_note=_NO_TENSOR_CORES,
    ),
    KernelSpec(
        name="torch_prefill",
        phase=Phase.PREFILL,
        target="kernels.attention.pytorch.rows:make_prefill",
        dtypes=frozenset(DTYPES),
        cpu=True,
        sm=_ANY_GPU,
        quantised=_FP8_BY_PYTORCH,
        note="PyTorch row: the kernel of the CPU, the fallback of every GPU",
    ),
    KernelSpec(
        name="torch_decode",
        phase=Phase.DECODE,
        target="kernels.attention.pytorch.rows:make_decode",
        dtypes=frozenset(DTYPES),
        cpu=True,
        sm=_ANY_GPU,
        quantised=_FP8_BY_PYTORCH,
        note="PyTorch row: the kernel of the CPU, the fallback of every GPU",
    ),
)

PREFIX_REGISTRY: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="portable_prefix",
        phase=Phase.DECODE,
        target="kernels.attention.portable.prefix:PortablePrefix",
        dtypes=frozenset(DTYPES),
        sm=_AMPERE_ON,
        head_dims=_HEAD_DIMS,
        block_sizes=(1, 256),
        sliding_window=False,
        non_causal=True,
        lse=True,
        quantised=_FP8_BY_TRITON,
        launch=LaunchConfig(block_m=32, block_n=32, num_warps=4, num_stages=1),
        note="reads once what the sequences of a decode share",
        arch_note=_NO_TENSOR_CORES,
    ),
)
"""The kernels that attend a whole decode to the tokens its sequences share; without one, each reads them."""
