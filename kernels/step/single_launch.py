"""The door to decode steps of one sequence in one launch: a model's layers, its head and the choice of a token.

Dimensions: V vocabulary, C hidden size, H query heads, K key-value heads, D head dim, N blocks, S block size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kernels.arch import HOPPER

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.arch import GPUArch
    from kernels.step.gpu.kernel import StepKernel

__all__ = ["LayerWeights", "StepShape", "StepWeights", "bind_step", "objection"]

_DTYPES: Final = (torch.bfloat16, torch.float16)
_HEAD_DIMS: Final = (64, 128)
_ALIGNMENT: Final = 1024
"""Inputs of a linear layer that a stage of the ring has of 8 outputs."""
_MOST_HIDDEN: Final = 2048
"""The hidden state is held in registers, and larger models take longer than their launches."""
_MOST_INNER: Final = 8192
_MOST_GROUP: Final = 4
"""With 8 the attention needs more registers than there are."""
_MOST_SMS: Final = 256
"""Programs that the choice of a token knows."""
_TILE: Final = 8


class StepShape(NamedTuple):
    """Sizes of a model."""

    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    softmax_scale: float


class LayerWeights(NamedTuple):
    """Parameters of a layer, contiguous.

    Attributes:
        qkv: [(H + 2 * K) * D, C].
        output: [C, H * D].
        gate_up: [2 * inner size, C].
        down: [C, inner size].
        input_norm: [C].
        mlp_norm: [C].
        q_norm: [D], as is `k_norm`; None where the family has none.
        qkv_bias: [(H + 2 * K) * D] or None.
    """

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None


class StepWeights(NamedTuple):
    """Parameters of a model, which are read where they are: none may be replaced.

    Attributes:
        embedding: [V, C].
        head: [V, C].
        norm: [C], behind the layers.
    """

    shape: StepShape
    layers: list[LayerWeights]
    embedding: Tensor
    head: Tensor
    norm: Tensor


def objection(shape: StepShape, dtype: torch.dtype, arch: GPUArch) -> str:
    """Say why the steps of a model cannot be computed in one launch; empty where they can.

    Args:
        shape: of the model.
        dtype: of its weights, and of its KV cache unless that is in FP8.
        arch: of its device.
    """
    sizes = {
        "hidden size": shape.hidden_size,
        "intermediate size": shape.inner_size,
        "size of all heads": shape.num_heads * shape.head_dim,
    }
    odd = next((f"a {name} of {size}" for name, size in sizes.items() if size % _ALIGNMENT), "")
    queries = sizes["size of all heads"]
    checks = (
        (not arch.unsupported(HOPPER), "sm_90", "a CPU" if arch.is_cpu else f"sm_{arch.sm}"),
        (dtype in _DTYPES, "bfloat16 and float16", str(dtype).removeprefix("torch.")),
        (
            shape.num_kv_heads <= arch.num_sms <= _MOST_SMS,
            f"{shape.num_kv_heads} SMs for as many key-value heads, and up to {_MOST_SMS}",
            f"{arch.num_sms}",
        ),
        (shape.head_dim in _HEAD_DIMS, f"head dims {_HEAD_DIMS}", f"{shape.head_dim}"),
        (
            shape.hidden_size <= _MOST_HIDDEN,
            f"hidden sizes up to {_MOST_HIDDEN}",
            f"{shape.hidden_size}",
        ),
        (
            shape.inner_size <= _MOST_INNER,
            f"intermediate sizes up to {_MOST_INNER}",
            f"{shape.inner_size}",
        ),
        (
            queries <= _MOST_INNER,
            f"sizes of all heads up to {_MOST_INNER}",
            f"{queries}",
        ),
        (not odd, f"sizes that are multiples of {_ALIGNMENT}", odd),
        (
            shape.num_heads & (shape.num_heads - 1) == 0,
            "powers of two of heads",
            f"{shape.num_heads}",
        ),
        (
            shape.num_heads <= _MOST_GROUP * shape.num_kv_heads,
            f"up to {_MOST_GROUP} query heads for a key-value head",
            f"{shape.num_heads} for {shape.num_kv_heads}",
        ),
        (
            shape.vocab_size % _TILE == 0,
            f"vocabularies that are multiples of {_TILE}",
            f"{shape.vocab_size}",
        ),
    )
    return next(
        (
            f"one launch for a step takes {takes}, not {has}"
            for good, takes, has in checks
            if not good
        ),
        "",
    )


def bind_step(
    weights: StepWeights,
    caches: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    arch: GPUArch,
) -> StepKernel:
    """Bind the decode steps of one sequence to a model and a cache.

    Args:
        weights: of a model that `objection` has nothing against.
        caches: [2, N, S, K, D] contiguous for each layer, in the weights' dtype or float8_e4m3fn; they must stay where
            they are, as must `scales`.
        scales: [2, N, K, S] float32 contiguous for each layer of a cache in float8_e4m3fn, None for others.
        arch: of their device.
    """
    from kernels.step.gpu.kernel import StepKernel  # noqa: PLC0415 - Triton is not everywhere

    return StepKernel(weights, caches, scales, arch.num_sms)
