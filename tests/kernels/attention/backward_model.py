"""The tile algorithm of Hopper's one-pass backward in PyTorch, in the place of its launch: same tiles and roundings.

`seeing_tiles` is the kernel's own function, run with Python's numbers. Products are exact and sums in float32, as on
the tensor cores; only the order of the terms within a tile is PyTorch's. Thread blocks run in random order.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels.attention.hopper import backward_tiles


def seeing_tiles(
    tile: SimpleNamespace, window: int, c: SimpleNamespace
) -> tuple[int, int, int, int]:
    """Return the results of the kernel's function."""
    with mock.patch.object(backward_tiles, "gl", SimpleNamespace(maximum=max, minimum=min)):
        found: tuple[int, int, int, int] = backward_tiles.seeing_tiles.fn(tile, window, c)
    return found


class ModelledBackward:
    """Takes the place of the kernel `backward`; `tiles` and `masked` count the tiles that it visits."""

    def __init__(self) -> None:
        self.tiles = self.masked = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        """Return a function that runs the programs of a grid, in random order."""
        programs = list(itertools.product(*map(range, grid)))
        random.Random(0).shuffle(programs)

        def launch(*arguments: Any, **constants: Any) -> None:
            for program in programs:
                self._run(program, SimpleNamespace(**constants), *arguments)

        return launch

    def _run(
        self, program: tuple[int, int, int], c: SimpleNamespace, q: Any, k: Any, v: Any, do: Any, stats: Any,
        sums: Tensor, dk: Tensor, dv: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float, scale_log2: float, window: int,
    ) -> None:  # fmt: skip
        number, kv_head, sequence = program
        start_q, start_k = int(cu_q[sequence]), int(cu_k[sequence])
        tile = SimpleNamespace(
            first=number * c.BLOCK_N,
            num_q=int(cu_q[sequence + 1]) - start_q,
            num_k=int(cu_k[sequence + 1]) - start_k,
        )
        if tile.first >= tile.num_k:
            return
        dtype = q.base.dtype
        kept = tile.num_k - tile.first
        key, value = (
            _keep(_copy(desc, start_k + tile.first, kv_head), kept).float() for desc in (k, v)
        )
        dkey, dvalue = torch.zeros(2, c.BLOCK_N, c.D)
        begin, count, edge, inside = seeing_tiles(tile, window, c)
        scratch = (start_q + sequence * c.BLOCK_M) // c.BLOCK_M
        for used in range(count * c.GROUP):
            i, head = used // c.GROUP, kv_head * c.GROUP + used % c.GROUP
            first = (begin + i) * c.BLOCK_M
            query, grad = (
                _keep(_copy(desc, start_q + first, head), tile.num_q - first).float()
                for desc in (q, do)
            )
            entry = (scratch + begin + i) * c.HEADS + head
            log_sum, delta = stats.base[entry * 2 * c.BLOCK_M :][: 2 * c.BLOCK_M].view(2, c.BLOCK_M)
            s = key @ query.T
            seen = _seen(tile, first, window, c)
            if i < edge or i >= inside:
                s = s.masked_fill(~seen, -torch.inf)
                self.masked += 1
            else:
                assert bool(seen.all()), f"tile {i} of {program} needs a mask"
            self.tiles += 1
            p = torch.exp2(s * scale_log2 - log_sum)
            dscores = (p * (value @ grad.T - delta)).to(dtype).float()
            dvalue += p.to(dtype).float() @ grad
            dkey += dscores @ query
            size = c.BLOCK_M * c.D
            sums[entry * size :][:size] += _in_order_of_registers(dscores.T @ key)
        rows = min(c.BLOCK_N, kept)
        place = slice(start_k + tile.first, start_k + tile.first + rows)
        dk[place, kv_head] = (dkey * scale)[:rows].to(dtype)
        dv[place, kv_head] = dvalue[:rows].to(dtype)


def _copy(desc: Any, row: int, head: int) -> Tensor:
    """Return what a bulk copy writes: rows past the end of the tensor are 0."""
    rows = desc.block_shape[0]
    found = desc.base[row : row + rows, head]
    return torch.cat([found, found.new_zeros(rows - len(found), found.shape[1])])


def _keep(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x[:rows], torch.zeros_like(x[rows:])]) if rows < len(x) else x


def _seen(tile: SimpleNamespace, first: int, window: int, c: SimpleNamespace) -> Tensor:
    """Return which scores, [keys, queries], the kernel's mask keeps."""
    key, query = torch.arange(c.BLOCK_N)[:, None], torch.arange(c.BLOCK_M)
    if not c.CAUSAL:
        return (key < tile.num_k - tile.first) & (query == query)
    distance = query - (key + tile.first - (tile.num_k - tile.num_q) - first)
    return (distance >= 0) & (distance < window) if c.WINDOW else distance >= 0


def _in_order_of_registers(part: Tensor) -> Tensor:
    """Return a tile's gradient of queries, [64, D], in the order of the sums; see `backward_roles`."""
    return (
        part.reshape(4, 2, 8, 2, part.shape[1] // 16, 4, 2).permute(4, 3, 0, 2, 5, 1, 6).flatten()
    )
