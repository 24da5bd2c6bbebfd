"""Launch configurations: a kernel's tile sizes and their provenance."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Tile sizes of a compiled kernel.

    Attributes:
        block_m: query rows per tile; a row is one query head of one token.
        block_n: keys per tile.
        num_warps: warps per thread block, or per role of a warp-specialized kernel.
        num_stages: tiles of keys and values in flight.
        programs_per_sm: thread blocks per SM that a decode's key splits should fill.
        one_loop: whether a prefill masks every tile, in one loop instead of separate masked and unmasked loops.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    one_loop: bool = False


@dataclass(frozen=True, slots=True)
class TunedLaunch:
    """A row of a tuning table.

    Attributes:
        launch: the tile sizes.
        max_seqlen_k: largest number of keys of a sequence that the row applies to; None for any length.
        provenance: source of the numbers.
        measured: whether they were chosen by timing on this architecture.
        min_num_seqs: smallest number of sequences of a step that the row applies to.
    """

    launch: LaunchConfig
    max_seqlen_k: int | None
    provenance: str
    measured: bool
    min_num_seqs: int = 0
