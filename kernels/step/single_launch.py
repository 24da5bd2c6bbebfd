"""A decode step of one sequence in a single launch: all layers, the output head and the argmax of the logits.

Dimensions: V vocabulary, C hidden size, H query heads, K key-value heads, D head dim, N blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kernels.arch import HOPPER
from kernels.step.weights import LayerWeights, StepShape, StepWeights

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.arch import GPUArch

__all__ = ["LayerWeights", "StepShape", "StepWeights", "bind_step", "launch_refusal", "unsupported"]

_DTYPES: Final = (torch.bfloat16, torch.float16)
_HEAD_DIMS: Final = (64, 128)
_ALIGNMENT: Final = 1024
"""Inputs of a linear layer that a stage of the ring holds for 8 outputs."""
_MOST_HIDDEN: Final = 2048
"""The hidden state is held in registers, and steps of larger models take longer than their launches."""
_MOST_INNER: Final = 8192
_MOST_GROUP: Final = 4
"""Query heads per key-value head; with 8, attention needs more registers than there are."""
_MOST_SMS: Final = 256
"""Programs whose results the argmax reduces, at most."""
_TILE: Final = 8
_REFUSALS: Final = ("too many blocks in cooperative launch", "operation not supported")
"""The driver's texts of CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE and CUDA_ERROR_NOT_SUPPORTED, part of Triton's."""


StepKernel: TypeAlias = Callable[..., None]
"""A bound step; called as `kernels.step.gpu.kernel.StepKernel` documents."""


def unsupported(shape: StepShape, dtype: torch.dtype, arch: GPUArch) -> tuple[str, ...]:
    """List why the decode steps of a model cannot be single launches; empty if they can.

    Args:
        shape: sizes of the model.
        dtype: of its weights, and of its KV cache unless that is in FP8.
        arch: of its device.
    """
    queries = shape.num_heads * shape.head_dim
    sizes = {
        "a hidden size": (shape.hidden_size, _MOST_HIDDEN),
        "an intermediate size": (shape.inner_size, _MOST_INNER),
        "a size of all heads": (queries, _MOST_INNER),
    }
    heads, kv_heads, vocab = shape.num_heads, shape.num_kv_heads, shape.vocab_size
    tests = (
        (dtype not in _DTYPES, f"no {str(dtype).removeprefix('torch.')}"),
        (
            not kv_heads <= arch.num_sms <= _MOST_SMS,
            f"{arch.num_sms} SMs for {kv_heads} key-value heads; from {kv_heads} to {_MOST_SMS}",
        ),
        (
            shape.head_dim not in _HEAD_DIMS,
            f"head_dim {shape.head_dim} is not one of {_HEAD_DIMS}",
        ),
        *(
            test
            for name, (size, most) in sizes.items()
            for test in (
                (size > most, f"{name} of {size}, at most {most}"),
                (size % _ALIGNMENT > 0, f"{name} of {size}, not a multiple of {_ALIGNMENT}"),
            )
        ),
        (heads.bit_count() > 1, f"{heads} heads are not a power of two"),
        (
            heads > _MOST_GROUP * kv_heads,
            f"{heads} query heads for {kv_heads}, at most {_MOST_GROUP} for each",
        ),
        (vocab % _TILE > 0, f"a vocabulary of {vocab}, not a multiple of {_TILE}"),
    )
    return arch.unsupported(HOPPER) + tuple(reason for fails, reason in tests if fails)


def launch_refusal(error: RuntimeError) -> str | None:
    """Return why the driver has refused the launch, None if the error is another one.

    The kernel's programs wait for each other, so all must run at once. Where other processes may use a part of the GPU
    (MPS, MIG, limited SMs), the driver does not promise that. The refusal leaves the device as it was.
    """
    for text in _REFUSALS:
        if text in str(error):
            return f"the driver refuses the launch ({text})"
    return None


def bind_step(
    weights: StepWeights,
    caches: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    arch: GPUArch,
) -> StepKernel:
    """Bind the decode steps of one sequence to a model and a cache.

    Args:
        weights: of a model for which `unsupported` lists nothing.
        caches: [2, N, S, K, D] contiguous for each layer, in the weights' dtype or float8_e4m3fn; neither they nor
            `scales` may be replaced.
        scales: [2, N, K, S] float32 contiguous for each layer of a cache in float8_e4m3fn, None for others.
        arch: of their device.
    """
    from kernels.step.gpu.kernel import StepKernel as Kernel  # noqa: PLC0415 - Triton is not everywhere

    return Kernel(weights, caches, scales, arch.num_sms)
