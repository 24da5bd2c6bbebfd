"""Decode steps that are a single launch: which ones, their kernels bound to a model and its caches, and the launch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch

from kernels import detect
from kernels.step.single_launch import (
    ROW_COUNTS,
    LayerWeights,
    StepShape,
    StepWeights,
    bind_step,
    has_run,
    launch_refusal,
)
from kernels.step.single_launch import unsupported as shape_unsupported
from model.network.step import StepOutput

__all__ = [
    "ROW_COUNTS", "SingleLaunches", "bind_single_launch", "has_run", "launch_once", "launch_refusal", "step_shape",
    "unsupported",
]  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kernels import GPUArch
    from kernels.step.single_launch import StepKernel
    from kernels.weight_format import WeightFormat
    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.network.layers import DecoderLayer
    from model.network.step import StepInput

_logger = logging.getLogger(__name__)

_LOCAL_ROPE: Final = "rotary embedding of its own for layers with a sliding window"
_OF_THE_KERNEL: Final = {
    "norms after attention and MLP",
    "gelu_tanh activation",
    _LOCAL_ROPE,
    "factor on embeddings",
}
"""Of `ModelConfig.beyond_llama`: what the kernel of one sequence computes; that of several refuses it itself."""


class SingleLaunches:
    """The single-launch kernels of a model's decode steps, by cache and number of sequences.

    Attributes:
        refusals: why the driver has refused launches; if there is one, no step is a single launch any more.
    """

    def __init__(self) -> None:
        self.refusals: tuple[str, ...] = ()
        # None where a step is computed layer by layer.
        self._kernels: WeakKeyDictionary[KVCache, dict[int, StepKernel | None]] = (
            WeakKeyDictionary()
        )

    def kernel(
        self, kv_cache: KVCache, rows: int, bind: Callable[[KVCache, int], StepKernel | None]
    ) -> StepKernel | None:
        """Return the kernel of steps of `rows` sequences on a cache; `bind` binds it at its first use."""
        if rows not in (1, *ROW_COUNTS):
            return None
        kernels = self._kernels.setdefault(kv_cache, {})
        if rows not in kernels:
            kernels[rows] = bind(kv_cache, rows)
        return kernels[rows]

    def replace(self, error: RuntimeError) -> bool:
        """Stop using the kernels if an error is the driver's refusal of a launch; return whether that is new."""
        reason = launch_refusal(error)
        if reason is None or reason in self.refusals:
            return False
        _logger.warning("a decode step is not a single launch: %s", reason)
        self.refusals += (reason,)
        for kernels in self._kernels.values():
            kernels.update(dict.fromkeys(kernels))
        return True


def launch_once(
    kernel: StepKernel,
    step: StepInput,
    embedding: Tensor,
    rope: tuple[Tensor, ...],
    sampled: Tensor | None,
    out: StepOutput | None,
) -> StepOutput:
    """Run a step of decode rows as a single launch; the kernel always computes the argmax.

    Args:
        kernel: bound to the model and the cache.
        step: as for `DecoderLM.step`, as are `sampled` and `out`.
        embedding: [V, C].
        rope: cos and sin of all positions; then those of layers with a sliding window if they have their own.
        sampled: [capacity] int64, or None.
        out: where to write the results; None for new tensors.

    Returns:
        `out` if it is given, else the new logits.
    """
    arrays, rows = step.device, step.bucket.rows
    logits, tokens, logprobs = out or StepOutput(embedding.new_empty((rows, len(embedding))))
    if tokens is None or logprobs is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=embedding.device)
        logprobs = torch.empty_like(tokens, dtype=torch.float32)
    sampled_rows = arrays.sampled_rows
    if sampled is None:
        sampled = torch.empty_like(tokens)
        sampled_rows = torch.arange(rows, device=embedding.device) if rows > 1 else tokens
    kernel(
        arrays.token_ids,
        arrays.positions,
        arrays.slot_mapping,
        arrays.block_table,
        rope,
        logits,
        tokens,
        logprobs,
        sampled,
        *((sampled_rows,) if rows > 1 else ()),
    )
    return StepOutput(logits, tokens, logprobs)


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
            layer.qkv.weight,
            layer.output.weight,
            layer.gate_up.weight,
            layer.down.weight,
            layer.input_norm,
            layer.mlp_norm,
            layer.q_norm,
            layer.k_norm,
            layer.qkv_bias,
            config.layer_window(index),
            layer.output_norm,
            layer.down_norm,
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
        activation=config.activation,
        embedding_factor=config.hidden_size**0.5 if config.scale_embeddings else 1.0,
        post_norms=config.post_norms,
    )


def unsupported(
    config: ModelConfig,
    dtype: torch.dtype,
    weight_format: WeightFormat,
    arch: GPUArch,
    rows: int = 1,
    *,
    unmeasured: bool = False,
) -> tuple[str, ...]:
    """List why a decode step cannot be a single launch; empty if it can.

    Args:
        config: the model's configuration.
        dtype: dtype of its parameters.
        weight_format: of the layers' matrices.
        arch: architecture that the model runs on.
        rows: sequences of the step, 1 or one of `ROW_COUNTS`.
        unmeasured: whether kernels may be chosen that were never measured on a GPU.
    """
    features = {
        "bias of the output projection": config.attention_output_bias,
        "biases of the MLP": config.mlp_bias,
        "float32 weights of norms for several sequences": config.norms_add_one and rows > 1,
        f"{_LOCAL_ROPE} for several sequences": _LOCAL_ROPE in config.beyond_llama and rows > 1,
    }
    beyond = (part for part in config.beyond_llama if part not in _OF_THE_KERNEL)
    missing = (*(name for name, has in features.items() if has), *beyond)
    reasons = shape_unsupported(
        step_shape(config), dtype, arch, rows, weight_format, unmeasured=unmeasured
    )
    return reasons + tuple(f"no {name}" for name in missing)
