"""The public API of the kernels: paged attention, attention for training, and the layer operations in PyTorch."""

from kernels.arch import GPUArch, detect
from kernels.attention.cascade import shared_prefix_is_faster, takes_shared_prefix
from kernels.attention.functional import (
    decode_attention,
    plan_attention,
    prefill_attention,
    write_kv,
)
from kernels.attention.plan import AttentionPlan
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.attention.select import Selection, select
from kernels.attention.training.autograd import flash_attention
from kernels.attention.training.block_mask import BlockMask
from kernels.attention.training.drop_in import scaled_dot_product_attention
from kernels.attention.training.memory_efficient import memory_efficient_attention
from kernels.attention.training.ring import ring_attention
from kernels.errors import KernelError, NoKernelError, ShapeError, UnsupportedDeviceError
from kernels.fp8 import FP8
from kernels.norms.pytorch import rms_norm, silu_and_mul
from kernels.rope.pytorch import apply_rope, rope_tables

__all__ = [
    "FP8", "AttentionPlan", "AttentionProblem", "BlockMask", "GPUArch", "KernelError", "NoKernelError",
    "PackedBatch", "PagedBatch", "Phase", "Selection", "ShapeError", "UnsupportedDeviceError", "apply_rope",
    "decode_attention", "detect", "flash_attention", "memory_efficient_attention", "plan_attention",
    "prefill_attention", "ring_attention", "rms_norm", "rope_tables", "scaled_dot_product_attention",
    "select", "shared_prefix_is_faster", "silu_and_mul", "takes_shared_prefix", "write_kv",
]  # fmt: skip
