"""Binds a model and its cache to the decode step in a single launch, where its shape and its GPU allow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import detect
from kernels.step.single_launch import LayerWeights, StepKernel, StepShape, StepWeights, bind_step
from kernels.step.single_launch import unsupported as shape_unsupported

if TYPE_CHECKING:
    from kernels import GPUArch
    from model.device.kv_cache import KVCache
    from model.network.decoder import DecoderLM


def bind_single_launch(model: DecoderLM, kv_cache: KVCache) -> StepKernel:
    """Bind the parameters, which must not be replaced, and the cache, which must stay where it is.

    Args:
        model: for which `unsupported` lists nothing.
        kv_cache: on the model's device.
    """
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    layers = [
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
        )
        for layer in model.decoder_layers
    ]
    weights = StepWeights(step_shape(model), layers, model.embed_tokens, head, model.norm)
    return bind_step(weights, kv_cache.layers, kv_cache.scales, detect(head.device))


def step_shape(model: DecoderLM) -> StepShape:
    """Return the sizes of a model."""
    config = model.config
    return StepShape(
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        softmax_scale=model.softmax_scale,
    )


def unsupported(model: DecoderLM, arch: GPUArch) -> tuple[str, ...]:
    """List why a model's decode steps of one sequence are not a single launch; empty if they are.

    Args:
        model: on any device.
        arch: where it runs.
    """
    config = model.config
    features = {
        "quantized weights": model.is_quantized,
        "sliding windows": config.sliding_window is not None,
        "a bias of the output projection": config.attention_output_bias,
        "biases of the MLP": config.mlp_bias,
    }
    return shape_unsupported(step_shape(model), model.embed_tokens.dtype, arch) + tuple(
        f"no {name}" for name, has in features.items() if has
    )
