"""The input of the first layer: embeddings of tokens, scaled or with learned positions where the family has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from model.network.spec import Network


def finish_embeddings(
    network: Network, hidden: Tensor, positions: Tensor, position_table: Tensor | None
) -> Tensor:
    """Scale the embeddings of tokens, or add those of their positions, as the family demands.

    Args:
        network: of the model.
        hidden: [..., T, C], the embeddings of the tokens.
        positions: [T] int64, each token's index in its sequence.
        position_table: [offset + count, C] of `Positions`, the learned positions; None if the family has none.

    Returns:
        [..., T, C] in hidden's dtype.
    """
    if network.embedding_factor != 1.0:
        # The factor is rounded to the dtype, as in training.
        factor = torch.tensor(network.embedding_factor, dtype=hidden.dtype).item()
        hidden = hidden * factor
    if network.positions is not None and position_table is not None:
        hidden = hidden + functional.embedding(
            positions, position_table[network.positions.offset :]
        )
    return hidden
