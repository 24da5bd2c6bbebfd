"""A model's decode steps of one sequence in one launch, where its shape and its GPU are such that it pays.

Knows parameters and the KV cache; of the step it knows its tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import detect
from kernels.step.single_launch import LayerWeights, StepShape, StepWeights, bind_step, objection

if TYPE_CHECKING:
    from torch import Tensor

    from kernels import GPUArch
    from model.device.kv_cache import KVCache
    from model.network.decoder import DecoderLM
    from model.network.rope import RotaryEmbedding


class OneSequence:
    """Decode steps of one sequence, each one launch.

    Args:
        model: that `why_not` has nothing against; its parameters must not be replaced.
        kv_cache: must stay where it is.
    """

    def __init__(self, model: DecoderLM, kv_cache: KVCache) -> None:
        self._rope: RotaryEmbedding = model.rope
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
        self._step = bind_step(weights, kv_cache.layers, kv_cache.scales, detect(head.device))

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        logits: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        drawn: Tensor,
    ) -> None:
        """Compute a step; arguments as for `kernels.step.gpu.kernel.StepKernel`."""
        rope = self._rope.tables
        self._step(ids, positions, slots, block_table, rope, logits, tokens, logprobs, drawn)


def step_shape(model: DecoderLM) -> StepShape:
    """Return what a model's steps look like."""
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


def why_not(model: DecoderLM, arch: GPUArch) -> str:
    """Say why a model's decode steps of one sequence are not one launch; empty where they are.

    Args:
        model: on any device.
        arch: where it runs.
    """
    config = model.config
    if reason := objection(step_shape(model), model.embed_tokens.dtype, arch):
        return reason
    unknown = {
        "quantised weights": model.is_quantised,
        "sliding windows": config.sliding_window is not None,
        "a bias of the output projection": config.attention_output_bias,
        "biases of the MLP": config.mlp_bias,
    }
    return ", ".join(
        f"one launch for a step does not know {name}" for name, has in unknown.items() if has
    )
