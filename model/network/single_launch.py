"""Binds a model and its cache to the kernel that runs a decode step in a single launch, if model and GPU allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import detect
from kernels.step.single_launch import (
    ROW_COUNTS,
    LayerWeights,
    StepShape,
    StepWeights,
    bind_step,
    launch_refusal,
)
from kernels.step.single_launch import unsupported as shape_unsupported

__all__ = ["ROW_COUNTS", "bind_single_launch", "launch_refusal", "step_shape", "unsupported"]

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from kernels import GPUArch
    from kernels.step.single_launch import StepKernel
    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.network.layers import DecoderLayer


def bind_single_launch(
    config: ModelConfig,
    layers: Sequence[DecoderLayer],
    embedding: Tensor,
    head: Tensor,
    norm: Tensor,
    kv_cache: KVCache,
    rows: int = 1,
) -> StepKernel:
    """Bind the parameters and the cache. Neither may be reallocated afterwards.

    Args:
        config: configuration of a model for which `unsupported` returns no reasons.
        layers: the layers in order.
        embedding: [V, C].
        head: [V, C].
        norm: [C], the final norm.
        kv_cache: on the model's device.
        rows: sequences of a step, 1 or one of `ROW_COUNTS`.
    """
    weights = [
        LayerWeights(
            layer.qkv,
            layer.output,
            layer.gate_up,
            layer.down,
            layer.input_norm,
            layer.mlp_norm,
            layer.q_norm,
            layer.k_norm,
            layer.qkv_bias,
            config.layer_window(index),
        )
        for index, layer in enumerate(layers)
    ]
    step = StepWeights(step_shape(config), weights, embedding, head, norm)
    return bind_step(step, kv_cache.layers, kv_cache.scales, detect(head.device), rows)


def step_shape(config: ModelConfig) -> StepShape:
    """Return the sizes of a model that the kernel is compiled for."""
    return StepShape(
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        eps=config.norm_eps,
        softmax_scale=config.softmax_scale,
    )


def unsupported(
    config: ModelConfig,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    arch: GPUArch,
    rows: int = 1,
    *,
    unmeasured: bool = False,
) -> tuple[str, ...]:
    """List why a decode step cannot be a single launch; empty if it can.

    Args:
        config: the model's configuration.
        dtype: dtype of its parameters.
        weight_dtype: dtype of the layers' matrices if they are quantized; else None.
        arch: architecture that the model runs on.
        rows: sequences of the step, 1 or one of `ROW_COUNTS`.
        unmeasured: whether kernels that no GPU has ever run may be chosen: that of several sequences.
    """
    features = {
        "quantized weights": weight_dtype is not None,
        "a bias of the output projection": config.attention_output_bias,
        "biases of the MLP": config.mlp_bias,
    }
    missing = (*(name for name, has in features.items() if has), *config.beyond_llama)
    reasons = shape_unsupported(step_shape(config), dtype, arch, rows, unmeasured=unmeasured)
    return reasons + tuple(f"no {name}" for name in missing)
