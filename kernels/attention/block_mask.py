"""Block masks: which tiles of keys each tile of queries sees. Tiles that are not listed are never read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockMask:
    """The listed tiles, by rows for queries and by columns for keys (compressed sparse rows, both ways).

    Tile (i, j) holds queries i * block_q to (i + 1) * block_q - 1 and keys j * block_k to (j + 1) * block_k - 1 of each
    sequence and head. Within a listed tile the other rules, such as `causal`, still apply.

    Attributes:
        block_q: queries of a tile.
        block_k: keys of a tile.
        row_starts: [rows + 1] int32, first entry of each row in `columns`.
        columns: [entries] int32, tiles of keys that a row sees, ascending.
        column_starts: [columns + 1] int32, first entry of each column in `rows`.
        rows: [entries] int32, tiles of queries that see a column, ascending.
    """

    block_q: int
    block_k: int
    row_starts: Tensor
    columns: Tensor
    column_starts: Tensor
    rows: Tensor

    @classmethod
    def from_tiles(cls, tiles: Tensor, block_q: int, block_k: int) -> BlockMask:
        """Build a mask.

        Args:
            tiles: [rows, columns] bool, whether a tile is listed.
            block_q: queries of a tile.
            block_k: keys of a tile.

        Raises:
            ShapeError: `tiles` has another shape or dtype, or a tile has no queries or keys.
        """
        if tiles.ndim != 2 or tiles.dtype is not torch.bool:
            raise ShapeError(
                f"tiles is {tiles.dtype} {list(tiles.shape)}; expected bool [rows, columns]"
            )
        if block_q < 1 or block_k < 1:
            raise ShapeError(f"a tile of {block_q} queries and {block_k} keys; expected at least 1")
        starts, listed = zip(*(_compress(side) for side in (tiles, tiles.T)), strict=True)
        return cls(block_q, block_k, starts[0], listed[0], starts[1], listed[1])

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four arrays, in the order of the attributes."""
        return self.row_starts, self.columns, self.column_starts, self.rows


def _compress(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the starts and the column indices of the rows of a boolean matrix."""
    counts = tiles.sum(1)
    starts = torch.zeros(len(tiles) + 1, dtype=torch.int32, device=tiles.device)
    starts[1:] = counts.cumsum(0)
    return starts, tiles.nonzero()[:, 1].to(torch.int32).contiguous()
