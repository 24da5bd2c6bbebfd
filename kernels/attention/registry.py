"""The attention kernels as rows of data, most preferred first.

A new kernel is a row here, a file in `kernels/attention/`, and rows in the tuning tables. Nothing else
decides which kernel runs.
"""

from __future__ import annotations

import dataclasses

from kernels.arch import FP8_INSTRUCTIONS, HOPPER, TENSOR_CORES, TENSOR_MEMORY
from kernels.attention.launch import LaunchConfig
from kernels.attention.problem import DTYPES, Phase
from kernels.attention.spec import KernelSpec, QuantizedCache
from kernels.fp8 import FP8

_NO_WGMMA = "wgmma and setmaxnreg are Hopper's"
_POWERS_OF_TWO = frozenset({1, 2, 4, 8, 16, 32, 64})
_FP8_ON_HOPPER = QuantizedCache(
    kv_dtypes=frozenset({FP8}), dtypes=frozenset({"bfloat16", "float16"})
)
HOPPER_PREFILL = KernelSpec(
    name="hopper_prefill",
    phase=Phase.PREFILL,
    target="kernels.attention.hopper.prefill:HopperPrefill",
    dtypes=frozenset({"bfloat16", "float16"}),
    sm=HOPPER,
    flash_attention=3,
    # Copied to tiles of 64, 128 or 256 columns, whose unused columns are zeros.
    head_dims=frozenset(range(32, 257, 16)),
    block_sizes=(16, 256),
    power_of_two_blocks=True,
    group_sizes=frozenset(range(1, 65)),
    packed=True,
    non_causal=True,
    lse=True,
    row_tiles=frozenset({128, 192}),
    launch=LaunchConfig(block_m=128, block_n=64, num_warps=4, num_stages=2),
    arch_note=_NO_WGMMA,
)
"""Also the forward of attention for training, see `kernels.attention.training.registry`."""

HOPPER_DECODE = dataclasses.replace(
    HOPPER_PREFILL,
    name="hopper_decode",
    phase=Phase.DECODE,
    target="kernels.attention.hopper.decode:HopperDecode",
    packed=False,
    non_causal=False,
    several_queries=True,
    row_tiles=frozenset({64}),
    launch=LaunchConfig(block_m=64, block_n=32, num_warps=4, num_stages=2, programs_per_sm=2),
)

PORTABLE_PREFILL = KernelSpec(
    name="portable_prefill",
    phase=Phase.PREFILL,
    target="kernels.attention.portable.launch:PortablePrefill",
    dtypes=frozenset(DTYPES),
    sm=TENSOR_CORES,
    flash_attention=2,
    head_dims=frozenset({32, 64, 80, 96, 128, 192, 256, 512}),
    block_sizes=(1, 256),
    packed=True,
    non_causal=True,
    lse=True,
    quantized=QuantizedCache(
        kv_dtypes=frozenset({FP8}),
        dtypes=frozenset({"bfloat16", "float16"}),
        sm=FP8_INSTRUCTIONS,
        note="older GPUs have no instruction that converts FP8",
    ),
    launch=LaunchConfig(block_m=32, block_n=32, num_warps=8, num_stages=1),
    arch_note="Triton's dot uses tensor cores from sm_80 on",
)

CPU_PREFILL = KernelSpec(
    name="cpu_prefill",
    phase=Phase.PREFILL,
    target="kernels.attention.cpu_library:CPUAttention",
    dtypes=frozenset({"float32"}),
    cpu=True,
    in_library=True,
    flash_attention=2,
    head_dims=frozenset(range(16, 257, 16)),
    group_sizes=frozenset(range(1, 17)),
    several_queries=True,
    batch_invariant=True,
    note="one call of the C library; equal bits in every batch and chunk",
)
CPU_DECODE = dataclasses.replace(CPU_PREFILL, name="cpu_decode", phase=Phase.DECODE)
TORCH_PREFILL = KernelSpec(
    name="torch_prefill",
    phase=Phase.PREFILL,
    target="kernels.attention.pytorch.rows:make_prefill",
    dtypes=frozenset(DTYPES),
    cpu=True,
    sm=None,
    quantized=QuantizedCache(kv_dtypes=frozenset({FP8}), dtypes=frozenset(DTYPES)),
    note="PyTorch's attention: for the CPU, and the fallback for every GPU",
)

REGISTRY: tuple[KernelSpec, ...] = (
    dataclasses.replace(
        HOPPER_PREFILL,
        name="blackwell_prefill",
        target="kernels.attention.blackwell.prefill:BlackwellPrefill",
        sm=TENSOR_MEMORY,
        flash_attention=4,
        head_dims=frozenset({64, 128}),
        measured=frozenset(),
        row_tiles=frozenset({256}),
        launch=LaunchConfig(block_m=256, block_n=128, num_warps=4, num_stages=2),
        note="never run: no GPU has executed this kernel",
        arch_note="tcgen05 and tensor memory are those of Blackwell's data-centre GPUs",
    ),
    KernelSpec(
        name="hopper_fp8_prefill",
        phase=Phase.PREFILL,
        target="kernels.attention.hopper.fp8.prefill:HopperFP8Prefill",
        dtypes=frozenset({"bfloat16", "float16"}),
        sm=HOPPER,
        flash_attention=3,
        head_dims=frozenset({128}),
        block_sizes=(1, 256),
        group_sizes=_POWERS_OF_TWO,
        sliding_window=False,
        softcap=False,
        non_causal=True,
        lse=True,
        quantized_only=True,
        fewest_keys=8192,
        copied_bytes=1,
        row_tiles=frozenset({128}),
        quantized=_FP8_ON_HOPPER,
        launch=LaunchConfig(block_m=128, block_n=128, num_warps=4, num_stages=2),
        note="multiplies in FP8; steps of fewer than 8192 keys are those of hopper_unpacked_prefill",
        arch_note=_NO_WGMMA,
    ),
    HOPPER_PREFILL,
    dataclasses.replace(
        HOPPER_PREFILL,
        name="hopper_unpacked_prefill",
        target="kernels.attention.hopper.fp8.unpack:UnpackedPrefill",
        block_sizes=(1, 256),
        power_of_two_blocks=False,
        packed=False,
        quantized_only=True,
        quantized=_FP8_ON_HOPPER,
        copied_bytes=2,
        tuned_as=HOPPER_PREFILL.name,
        note="hopper_prefill, after a pass that converts the cache to the queries' dtype",
    ),
    PORTABLE_PREFILL,
    dataclasses.replace(
        HOPPER_DECODE,
        name="hopper_keys_on_m_decode",
        target="kernels.attention.hopper.decode:KeysOnMDecode",
        head_dims=frozenset(range(32, 129, 16)),
        group_sizes=frozenset(range(1, 17)),
        several_queries=False,
        measured=frozenset((64, group) for group in range(1, 9)),
        row_tiles=frozenset({16}),
        launch=LaunchConfig(block_m=16, block_n=64, num_warps=4, num_stages=2, programs_per_sm=3),
    ),
    HOPPER_DECODE,
    dataclasses.replace(
        PORTABLE_PREFILL,
        name="portable_decode",
        phase=Phase.DECODE,
        target="kernels.attention.portable.launch:PortableDecode",
        packed=False,
        non_causal=False,
        several_queries=True,
        launch=LaunchConfig(block_m=16, block_n=32, num_warps=4, num_stages=1, programs_per_sm=2),
    ),
    CPU_PREFILL,
    CPU_DECODE,
    TORCH_PREFILL,
    dataclasses.replace(
        TORCH_PREFILL,
        name="torch_decode",
        phase=Phase.DECODE,
        target="kernels.attention.pytorch.rows:make_decode",
    ),
)

PREFIX_REGISTRY: tuple[KernelSpec, ...] = (
    dataclasses.replace(
        PORTABLE_PREFILL,
        name="portable_prefix",
        phase=Phase.DECODE,
        target="kernels.attention.portable.launch:PortablePrefix",
        sliding_window=False,
        packed=False,
        note="reads the shared tokens of a decode's sequences once",
    ),
)
"""Kernels that compute attention of all sequences of a decode to their shared tokens. If none supports the problem,
each sequence reads those tokens itself."""


_EQUAL_BITS = "equal bits in every batch and chunk, from one kernel for prompts and decodes"


def _both_phases(
    prefill: KernelSpec, decode_launch: LaunchConfig | None = None
) -> tuple[KernelSpec, KernelSpec]:
    """Return the rows of a batch-invariant kernel, which computes both phases with the same key tiles.

    Args:
        prefill: the row of prompts.
        decode_launch: if decodes have fewer rows in a tile, their launch by default.
    """
    name = prefill.name.replace(Phase.PREFILL.value, Phase.DECODE.value)
    decode = dataclasses.replace(prefill, name=name, phase=Phase.DECODE, tuned_as=prefill.name)
    if decode_launch is not None:
        rows = frozenset({decode_launch.block_m})
        decode = dataclasses.replace(decode, launch=decode_launch, row_tiles=rows, tuned_as=None)
    return prefill, decode


_HOPPER_INVARIANT = dataclasses.replace(
    HOPPER_PREFILL,
    name="hopper_invariant_prefill",
    target="kernels.attention.hopper.invariant:HopperInvariant",
    head_dims=frozenset({*range(32, 129, 16), 192, 256}),  # others spill registers
    packed=False,
    non_causal=False,
    lse=False,
    batch_invariant=True,
    row_tiles=frozenset({128}),
    note=_EQUAL_BITS,
)
INVARIANT_REGISTRY: tuple[KernelSpec, ...] = (
    *_both_phases(
        _HOPPER_INVARIANT, LaunchConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    ),
    *_both_phases(
        dataclasses.replace(
            PORTABLE_PREFILL,
            name="invariant_prefill",
            target="kernels.attention.portable.launch:InvariantAttention",
            packed=False,
            non_causal=False,
            lse=False,
            batch_invariant=True,
            launch=LaunchConfig(block_m=16, block_n=16, num_warps=8, num_stages=1),
            note=_EQUAL_BITS,
        )
    ),
    CPU_PREFILL,
    CPU_DECODE,
)
"""Kernels for batch-invariant problems; of the rows of `REGISTRY` only those of the C library support these.

Both phases of a problem always have the same kernel, since the rows of a kernel support the same problems."""
