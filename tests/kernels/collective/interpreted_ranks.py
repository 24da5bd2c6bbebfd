"""One rank of the all-reduce in one launch, in Triton's interpreter; ranks are processes that share memory.

python -m tests.kernels.collective.interpreted_ranks <rank> <size> <folder>     results go to <folder>/<rank>.pt
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch

from tests.kernels import triton_interpreter

SIZES = (8, 2048, 4104, 16, 4096) * 4
"""Elements of each sum: of one to three programs, with part of a program and in no order."""
COLUMNS, EPS = 72, 1e-5
ROWS = (1, 3, 2, 3, 1)
"""Rows of the residual stream in the launches after each sum."""
SPLITS = (1, 2, 3)
"""Partial sums of each rank in turn; a single one is rounded already."""


def part(rank: int, launch: int) -> torch.Tensor:
    """Return what a rank adds in a launch."""
    generator = torch.Generator().manual_seed(1000 * rank + launch)
    x = torch.randn(SIZES[launch], generator=generator) * 10 ** (rank % 3)
    return x.to(torch.bfloat16)


def partials(rank: int, launch: int) -> torch.Tensor:
    """Return a rank's partial sums of the residual stream in a launch."""
    splits = SPLITS[launch % len(SPLITS)]
    generator = torch.Generator().manual_seed(1000 * rank + launch)
    x = torch.randn(splits, ROWS[launch % len(ROWS)], COLUMNS, generator=generator)
    return x.to(torch.bfloat16) if splits == 1 else x


def hidden(launch: int) -> torch.Tensor:
    """Return the residual stream before a launch, some columns of a wider tensor."""
    generator = torch.Generator().manual_seed(launch)
    wide = torch.randn(ROWS[launch % len(ROWS)], COLUMNS + 8, generator=generator)
    return wide.to(torch.bfloat16)[:, :COLUMNS]


def weight() -> torch.Tensor:
    """Return the weight of the norm."""
    return torch.linspace(0.5, 1.5, COLUMNS).to(torch.bfloat16)


def run(rank: int, size: int, folder: Path) -> None:
    """Add all parts and normalize the residual streams, replacing only the memory that GPUs share."""
    triton_interpreter.load()
    from kernels.collective import one_shot

    numbers = iter(range(3))

    def share_memory(num_bytes: int, _device: torch.device) -> tuple[list[torch.Tensor], list[int]]:
        # The files have this size already, so that all of them are zero and exist.
        number = next(numbers)
        shared = [
            torch.from_file(
                str(folder / f"memory-{it}-{number}"), shared=True, size=num_bytes, dtype=torch.uint8
            )
            for it in range(size)
        ]  # fmt: skip
        return shared, [it.data_ptr() for it in shared]

    arch = mock.Mock(num_sms=1)
    with (
        mock.patch.object(one_shot, "share_memory", share_memory),
        mock.patch.object(one_shot, "detect", return_value=arch),
    ):
        add = one_shot.OneShotSum(rank, size, torch.device("cpu"))
    results = []
    for launch in range(len(SIZES)):
        x = part(rank, launch)
        stream = hidden(launch)
        assert add.supports(x)
        assert add.normalizes(stream)
        total, squares = add(x), add(x.float().square())
        normalized = add.add_and_normalize(partials(rank, launch), stream, weight(), EPS, pdl=False)
        results.append((total, stream, normalized, squares))
    torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
