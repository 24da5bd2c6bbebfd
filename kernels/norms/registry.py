"""The registry of the norms and activations between products, most preferred row first."""

from __future__ import annotations

from typing import Final

from kernels.norms import cpu_library
from kernels.selection import VectorSpec, triton_unsupported

TRITON: Final = VectorSpec(
    name="triton_norm",
    target="kernels.norms.gpu.norm_and_gate:add_rms_norm",
    unsupported=triton_unsupported,
    note="in launches of their own where the kernel of a product does not include them",
)
CPU_LIBRARY: Final = VectorSpec(
    name="cpu_norm",
    target="kernels.norms.cpu_library:rms_norm",
    unsupported=cpu_library.unsupported,
    note="one call of the C library where a product does not include them; equal bits beside any rows",
)
PYTORCH: Final = VectorSpec(name="torch_norm", target="kernels.norms.pytorch:rms_norm")
"""Differentiable, on every device."""

REGISTRY: Final = (TRITON, CPU_LIBRARY, PYTORCH)
