"""The registry of the rotation of queries and keys with the write to the cache, most preferred row first."""

from __future__ import annotations

from typing import Final

from kernels.selection import VectorSpec, triton_unsupported

TRITON: Final = VectorSpec(
    name="triton_rope", target="kernels.rope.cache:TritonRotation", unsupported=triton_unsupported
)
"""Norms per head, rotation and write in one launch."""
PYTORCH: Final = VectorSpec(name="torch_rope", target="kernels.rope.pytorch:PyTorchRotation")
"""Separate operations, on every device."""

REGISTRY: Final = (TRITON, PYTORCH)
