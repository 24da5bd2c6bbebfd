"""Block masks: which tiles of keys each tile of queries sees. Tiles that are not listed are never read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.errors import ShapeError


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

    Example:
        >>> last_two = torch.ones(4, 4, dtype=torch.bool).tril().triu(-1)  # each tile and the one before
        >>> mask = BlockMask.from_tiles(last_two, block_q=16, block_k=16)
        >>> q, k, v = torch.randn(3, 1, 64, 4, 32)
        >>> flash_attention(q, k, v, block_mask=mask).shape
        torch.Size([1, 64, 4, 32])
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
        _check_sizes(block_q, block_k)
        starts, listed = zip(*(_compress(side) for side in (tiles, tiles.T)), strict=True)
        return cls(block_q, block_k, starts[0], listed[0], starts[1], listed[1])

    @classmethod
    def from_predicate(
        cls,
        predicate: Callable[[Tensor, Tensor], Tensor],
        num_queries: int,
        num_keys: int,
        block_q: int,
        block_k: int,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Build the mask of what a function says, which has to be the same for all pairs of a tile.

        A tile is listed or not. What cuts tiles, such as a causal mask, a window or the ends of documents, is left out
        of the function and given to `flash_attention` by its other arguments. It takes the memory of `block_q` rows of
        scores.

        Args:
            predicate: called with indices of queries [m, 1] and of keys [num_keys] in their sequence, int64; returns
                bool [m, num_keys] or a shape that broadcasts to it, true where a query sees a key.
            num_queries: at least those of the longest sequence.
            num_keys: the same for keys.
            block_q: queries of a tile.
            block_k: keys of a tile.
            device: of the mask; the function runs there.

        Raises:
            ShapeError: the function returns another shape or dtype, or differs within a tile, or a tile has no queries
                or keys, or there are fewer than none.
        """
        _check_sizes(block_q, block_k)
        if num_queries < 0 or num_keys < 0:
            raise ShapeError(f"{num_queries} queries and {num_keys} keys; expected at least 0")
        keys = torch.arange(num_keys, device=device)
        tiles = keys.new_zeros(
            -(-num_queries // block_q), -(-num_keys // block_k), dtype=torch.bool
        )
        for row in range(tiles.shape[0] if num_keys else 0):
            queries = torch.arange(
                row * block_q, min((row + 1) * block_q, num_queries), device=device
            )
            tiles[row] = _tile_row(predicate(queries[:, None], keys), queries, keys, block_k)
        return cls.from_tiles(tiles, block_q, block_k)

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four arrays, in the order of the attributes."""
        return self.row_starts, self.columns, self.column_starts, self.rows


def _check_sizes(block_q: int, block_k: int) -> None:
    if block_q < 1 or block_k < 1:
        raise ShapeError(f"a tile of {block_q} queries and {block_k} keys; expected at least 1")


def _tile_row(seen: Tensor, queries: Tensor, keys: Tensor, block_k: int) -> Tensor:
    """Return which tiles of a row of tiles are seen.

    Args:
        seen: what the function returned.
        queries: [m], those of the row.
        keys: [num_keys].
        block_k: keys of a tile.
    """
    shape = (len(queries), len(keys))
    try:
        seen = seen.expand(shape)
    except RuntimeError as error:
        raise ShapeError(
            f"the predicate returned {list(seen.shape)}; expected {list(shape)}"
        ) from error
    if seen.dtype is not torch.bool:
        raise ShapeError(f"the predicate returned {seen.dtype}; expected bool")
    parts = [seen[:, at : at + block_k] for at in range(0, len(keys), block_k)]
    some, all_ = (torch.stack([kind(it) for it in parts]) for kind in (torch.any, torch.all))
    if bool((some != all_).any()):
        column = int((some != all_).nonzero()[0, 0]) * block_k
        last_q, last_k = int(queries[-1]), min(column + block_k, len(keys)) - 1
        raise ShapeError(
            f"the predicate differs within the tile of queries {int(queries[0])} to {last_q} and keys {column} to "
            f"{last_k}; leave causal masks, windows and documents to the other arguments of flash_attention, or use "
            "smaller tiles"
        )
    return some


def _compress(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the starts and the column indices of the rows of a boolean matrix."""
    counts = tiles.sum(1)
    starts = torch.zeros(len(tiles) + 1, dtype=torch.int32, device=tiles.device)
    starts[1:] = counts.cumsum(0)
    return starts, tiles.nonzero()[:, 1].to(torch.int32).contiguous()
