"""The input of the first layer: embeddings of tokens, scaled or with learned positions where the family has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from model.checkpoint.config import ModelConfig


def finish_embeddings(
    config: ModelConfig, hidden: Tensor, positions: Tensor, position_table: Tensor | None
) -> Tensor:
    """Scale the embeddings of tokens, or add those of their positions, as the family demands.

    Args:
        config: the model's configuration.
        hidden: [..., T, C], the embeddings of the tokens.
        positions: [T] int64, each token's index in its sequence.
        position_table: [position_offset + positions, C], the learned positions; None if the family has none.

    Returns:
        [..., T, C] in hidden's dtype.
    """
    if config.scale_embeddings:
        # The factor is rounded to the dtype, as in training.
        factor = torch.tensor(config.hidden_size**0.5, dtype=hidden.dtype).item()
        hidden = hidden * factor
    if position_table is not None:
        hidden = hidden + functional.embedding(positions, position_table[config.position_offset :])
    return hidden
