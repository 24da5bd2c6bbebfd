"""The registry of the operations at both ends of a model, token embeddings and tokens, most preferred row first."""

from __future__ import annotations

from typing import Final

from kernels.selection import VectorSpec, triton_unsupported

TRITON: Final = VectorSpec(
    name="triton_sampling",
    target="kernels.sampling.gpu.sample_tokens:sample_tokens",
    unsupported=triton_unsupported,
)
PYTORCH: Final = VectorSpec(name="torch_tokens", target="kernels.sampling.tokens:log_softmax")

REGISTRY: Final = (TRITON, PYTORCH)
