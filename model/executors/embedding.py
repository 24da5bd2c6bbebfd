"""The input of the first layer: embeddings of tokens, scaled or with learned positions where the family has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kernels.sampling.tokens import embed_tokens, known_ids
from kernels.weight_format import unquantized

if TYPE_CHECKING:
    from torch import Tensor

    from model.network.parameters import DecoderParameters
    from model.network.spec import Network


def token_embeddings(
    model: DecoderParameters, ids: Tensor, sampled: Tensor | None = None
) -> Tensor:
    """Look up the embeddings of tokens, of which only those are dequantized.

    Args:
        model: has the embedding, in any format.
        ids: [T] int64, or -1 - i for the token `sampled[i]`.
        sampled: [R] int64; None where no id is below 0.

    Returns:
        [T, C] in the model's dtype.
    """
    if model.embedding_rows is not None:
        return model.embedding_rows(known_ids(ids, sampled))
    table = model.embedding
    if table.format == unquantized(model.dtype):
        return embed_tokens(ids, table.numbers, sampled)
    return table.gather(known_ids(ids, sampled)).dequantize(model.dtype)


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
