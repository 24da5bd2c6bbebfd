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
from model.executors.step import StepOutput
from model.network import spec

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
    from model.device.kv_cache import KVCache
    from model.executors.step import StepInput
    from model.network.layers import DecoderLayer

_logger = logging.getLogger(__name__)

READS: Final[spec.Reads] = {
    spec.Network: {"tied": spec.ALL, "embedding_factor": spec.ALL},
    spec.Layer: {"post_norms": spec.ALL},
    spec.Norm: {"eps": spec.ALL, "float32": spec.ALL},
    spec.Attention: dict.fromkeys(("window", "rotary", "qk_norm", "bias"), spec.ALL),
    spec.Rotary: spec.ALL,
    spec.Dense: {"activation": {"gelu_tanh"}},
}
"""What the launch of one sequence computes."""
VARYING: Final = ((spec.Attention, "window"), (spec.Attention, "rotary"))
READS_OF_ROWS: Final[spec.Reads] = {
    **READS,
    spec.Network: {"tied": spec.ALL},
    spec.Layer: {},
    spec.Norm: {"eps": spec.ALL},
    spec.Dense: {},
}
"""What the launch of several sequences computes."""
VARYING_OF_ROWS: Final = ((spec.Attention, "window"),)


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
    network: spec.Network,
    layers: Sequence[DecoderLayer],
    embedding: Tensor,
    head: Tensor,
    norm: Tensor,
    kv_cache: KVCache,
    rows: int = 1,
) -> StepKernel:
    """Bind the parameters and the cache. Neither may be reallocated afterwards.

    Args:
        network: of a model for which `unsupported` returns no reasons.
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
            layer.spec.mixer.window,
            layer.output_norm,
            layer.down_norm,
        )
        for layer in layers
    ]
    step = StepWeights(step_shape(network), weights, embedding, head, norm)
    return bind_step(step, kv_cache.layers, kv_cache.scales, detect(head.device), rows)


def step_shape(network: spec.Network) -> StepShape:
    """Return the sizes of a model that the kernel is compiled for."""
    first = network.layers[0]
    mixer, mlp = first.mixer, first.mlp
    return StepShape(
        hidden_size=network.hidden,
        inner_size=mlp.inner,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        vocab_size=network.vocab,
        eps=network.norm.eps,
        softmax_scale=mixer.scale,
        activation=mlp.activation,
        embedding_factor=network.embedding_factor,
        post_norms=first.post_norms,
    )


def unsupported(
    network: spec.Network,
    dtype: torch.dtype,
    weight_format: WeightFormat,
    arch: GPUArch,
    rows: int = 1,
    *,
    unmeasured: bool = False,
) -> tuple[str, ...]:
    """List why a decode step cannot be a single launch; empty if it can.

    Args:
        network: of the model.
        dtype: dtype of its parameters.
        weight_format: of the layers' matrices.
        arch: architecture that the model runs on.
        rows: sequences of the step, 1 or one of `ROW_COUNTS`.
        unmeasured: whether kernels may be chosen that were never measured on a GPU.
    """
    missing = spec.unsupported(network, READS, VARYING)
    if not spec.is_attention_and_dense(network):
        return missing
    reasons = shape_unsupported(
        step_shape(network), dtype, arch, rows, weight_format, unmeasured=unmeasured
    )
    missing += spec.different_norms(network, "eps", "float32")
    mixers = [layer.mixer for layer in network.layers]
    kinds = {(mixer.window is None, mixer.rotary) for mixer in mixers}
    if len(kinds) > len({has_window for has_window, _ in kinds}):
        missing += ("no rotary embeddings that differ among layers without a window, or with one",)
    if rows > 1:
        of_rows = spec.unsupported(network, READS_OF_ROWS, VARYING_OF_ROWS)
        missing += tuple(f"{it} for several sequences" for it in of_rows if it not in missing)
    return reasons + missing
