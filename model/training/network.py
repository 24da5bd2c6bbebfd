"""The decoder for training, which is the serving model with dropout, over packed documents; and its losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from kernels import flash_attention
from kernels.linear.projection import Purpose, Residual
from kernels.rope.pytorch import split_heads
from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM
from model.errors import UnsupportedModelError
from model.executors import support
from model.executors.layers.attention import BoundAttention
from model.executors.layers.executor import Layers
from model.executors.layers.forward import BoundLayer, Contexts, layer_forward, run_layers
from model.executors.support import ALL, unsupported
from model.network.spec import Attention, Dense, Layer, Network, Norm, Rotary
from model.training.prepare import CONTEXT_LENGTH
from model.training.streams import PackedTokens

_READS: Final[support.Reads] = {
    Network: {"tied": ALL},
    Layer: {"post_norms": ALL},
    Norm: {"eps": ALL, "kind": ALL},
    Attention: dict.fromkeys(("rotary", "qk_norm", "joint_qk_norm", "bias", "output_bias"), ALL),
    Rotary: ALL,
    Dense: ALL,
}
"""What packed documents are computed for; all layers must be alike."""
PackedAttend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Causal attention within each document: q [T, H, D], k and v [T, K, D], cu_seqlens [B + 1] to [T, H, D]."""


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Compute causal attention within each document by our own kernels; see `PackedAttend`."""
    # The same longest length in all batches, so that torch.compile compiles once and nothing waits for the GPU.
    return flash_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=CONTEXT_LENGTH, deterministic=False
    )


class PackedAttention:
    """Attention of a layer over packed documents; differentiable. Computes Llama's: no windows, no softcap.

    Args:
        rope: cos and sin of every token's position, as for `kernels.apply_rope`.
        cu_seqlens: as in `PackedTokens`.
        attend: computes it.
    """

    def __init__(
        self, rope: tuple[Tensor, Tensor], cu_seqlens: Tensor, attend: PackedAttend
    ) -> None:
        self._rope, self._cu_seqlens, self._attend = rope, cu_seqlens, attend

    def __call__(self, index: int, attention: BoundAttention, qkv: Tensor) -> Tensor:
        """Compute attention: [T, (H + 2 * K) * D] to [T, H * D]."""
        del index
        head_dim, num_kv_heads = attention.spec.head_dim, attention.spec.num_kv_heads
        q, k, v = split_heads(qkv, head_dim, num_kv_heads, attention.head_norms, self._rope)
        return self._attend(q.to(v.dtype), k.to(v.dtype), v, self._cu_seqlens).flatten(-2)


class TrainedLM(DecoderLM):
    """A `DecoderLM` with dropout on the embedding and on the output of each layer while `training` is set.

    Attributes:
        attend: computes attention over packed documents; `attend_packed` unless it is replaced.

    Raises:
        UnsupportedModelError: packed documents cannot be computed for the network.
    """

    def __init__(self, config: ModelConfig, dropout: float, device: torch.device) -> None:
        network = config.network
        missing = unsupported(network, _READS, ())
        if any(it.scale != it.head_dim**-0.5 for it in network.attentions):
            missing += ("no factor on scores but head_dim ** -0.5",)
        if missing:
            raise UnsupportedModelError(f"training: {'; '.join(missing)}")
        super().__init__(config, torch.float32, device)
        self.executors.layers = Layers(self, Purpose.TRAINING, self._run_layers)
        self.dropout = dropout
        self.attend: PackedAttend = attend_packed

    def packed_logits(self, batch: PackedTokens) -> Tensor:
        """Compute the logits of every next token of a batch, [T, vocab_size] in the autocast dtype."""
        bound = self.executors.layers.bound
        hidden = functional.embedding(batch.inputs, self.embedding.numbers)
        (rope,) = self.ropes
        tables = rope.dense(batch.positions, hidden.dtype)
        contexts: Contexts = {
            BoundAttention: PackedAttention(tables, batch.cu_seqlens, self.attend)
        }
        residual = self._run_layers(bound.layers, Residual(hidden), contexts)
        return self.logits(bound.norm(residual))

    def _run_layers(
        self, layers: Sequence[BoundLayer], residual: Residual, contexts: Contexts
    ) -> Residual:
        if not self.training or self.dropout == 0:
            return run_layers(layers, residual, contexts)
        hidden = functional.dropout(residual.hidden, self.dropout)
        for index, layer in enumerate(layers):
            after = layer_forward(index, layer, Residual(hidden), contexts).hidden
            hidden = hidden + functional.dropout(after - hidden, self.dropout)
        return Residual(hidden)


def model_logits(model: DecoderLM, ids: Tensor) -> Tensor:
    """Compute the logits of every next token.

    Args:
        model: on the device of `ids`.
        ids: int64 [R, L].

    Returns:
        [R, L, vocab_size] in the autocast dtype.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)
    return model.logits(model(ids, positions))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood, in nats, of int64 targets [T] under logits [T, V]."""
    return functional.cross_entropy(logits.float(), targets)


def training_loss(
    model: TrainedLM, batch: PackedTokens, teachers: Sequence[TrainedLM], distill_weight: float
) -> Tensor:
    """Return a weighted sum of two cross-entropies: with the text, and with the teachers' mean prediction.

    Args:
        model: to train.
        batch: packed documents.
        teachers: models over the same vocabulary; may be empty.
        distill_weight: share of the teachers' term, in [0, 1].

    Returns:
        Scalar, nats per token, float32.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", at temperature 1.
    """
    logits = model.packed_logits(batch)
    loss = cross_entropy(logits, batch.targets)
    if not teachers:
        return loss
    with torch.no_grad():
        expected = torch.stack(
            [teacher.packed_logits(batch).float().softmax(-1) for teacher in teachers]
        ).mean(0)
    soft = functional.cross_entropy(logits.float(), expected)
    return distill_weight * soft + (1 - distill_weight) * loss
