"""What the PyTorch attention rows share: reading runs of slots from the cache.

Knows neither queries nor phases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.attention.paged_host import Run


def run_slots(kv: Tensor, runs: Sequence[Run]) -> tuple[Tensor, Tensor]:
    """Read keys and values of the runs, each [length, K, D]; a view if there is one run."""
    keys, values = kv.flatten(1, 2).unbind(0)
    if len(runs) == 1:
        slot, length = runs[0]
        return keys.narrow(0, slot, length), values.narrow(0, slot, length)
    return (
        torch.cat([keys.narrow(0, slot, length) for slot, length in runs]),
        torch.cat([values.narrow(0, slot, length) for slot, length in runs]),
    )
