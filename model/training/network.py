"""The decoder for training, which is the serving model with dropout, and its losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.linear.projection import Residual
from model.checkpoint.config import ModelConfig
from model.network.decoder import DecoderLM
from model.network.layers import Attention, BoundLayer, layer_forward


class TrainedLM(DecoderLM):
    """A `DecoderLM` with dropout on the embedding and on the output of each layer while `training` is set."""

    def __init__(self, config: ModelConfig, dropout: float, device: torch.device) -> None:
        super().__init__(config, torch.float32, device)
        self.dropout = dropout

    def _run_layers(
        self, layers: list[BoundLayer], residual: Residual, attention: Attention
    ) -> Residual:
        if not self.training or self.dropout == 0:
            return super()._run_layers(layers, residual, attention)
        hidden = functional.dropout(residual.hidden, self.dropout)
        for index, layer in enumerate(layers):
            after = layer_forward(index, layer, Residual(hidden), attention).hidden
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
    """Return the mean negative log-likelihood, in nats, of int64 targets [R, L] under logits [R, L, V]."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def training_loss(
    model: DecoderLM, rows: Tensor, teachers: Sequence[DecoderLM], distill_weight: float
) -> Tensor:
    """Return a weighted sum of two cross-entropies: with the text, and with the teachers' mean prediction.

    Args:
        model: to train.
        rows: int64 [R, L + 1]; each token but the first is a target.
        teachers: models over the same vocabulary; may be empty.
        distill_weight: share of the teachers' term, in [0, 1].

    Returns:
        Scalar, nats per token, float32.

    Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", at temperature 1.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:]
    logits = model_logits(model, inputs)
    loss = cross_entropy(logits, targets)
    if not teachers:
        return loss
    with torch.no_grad():
        expected = torch.stack(
            [model_logits(teacher, inputs).float().softmax(-1) for teacher in teachers]
        ).mean(0)
    soft = functional.cross_entropy(logits.flatten(0, 1).float(), expected.flatten(0, 1))
    return distill_weight * soft + (1 - distill_weight) * loss
