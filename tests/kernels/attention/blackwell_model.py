"""The tile algorithm of the Blackwell prefill in PyTorch: the same tiles, masks, roundings and rescaling.

Constants are those of the kernel. Products are exact and sums in float32, as on the tensor cores; only the order of the
terms within a tile is PyTorch's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention.blackwell import exponentials
from kernels.attention.blackwell.pipeline import ROWS as KERNEL_ROWS
from kernels.attention.hopper.pipeline import heads_of_tile, rows_of_token
from kernels.attention.hopper.prefill import exponents
from tests.kernels.references.problems import PagedCase

ROWS = KERNEL_ROWS.value
BLOCK_N = 128
LAG = exponentials.LAG.value
MOST_KEYS = 1 << 30


def polynomial_exp2(x: Tensor) -> Tensor:
    """Return `exponentials.polynomial_exp2` of float32 numbers, step by step; float64 stands for fused products."""

    def fma(a: Tensor, b: Tensor | float, c: float) -> Tensor:
        return (a.double() * b + c).float()

    constants = (exponentials.CUBIC, exponentials.QUADRATIC, exponentials.LINEAR)
    cubic, quadratic, linear = (
        float(torch.tensor(it.value, dtype=torch.float32)) for it in constants
    )
    x = x.clamp_min(exponentials.LOWEST_EXPONENT.value)  # clamp keeps NaN
    shifted = x + exponentials.ROUNDING.value
    fraction = x - (shifted - exponentials.ROUNDING.value)
    y = fma(fraction, cubic, quadratic)
    y = fma(y, fraction.double(), linear)
    y = fma(y, fraction.double(), 1.0)
    bits = y.view(torch.int32).long() + (shifted.view(torch.int32).long() << 23)
    wrapped = (bits + (1 << 31)) % (1 << 32) - (1 << 31)
    return wrapped.int().view(torch.float32)


def exponentials_of(x: Tensor) -> Tensor:
    """Return the exponentials of a tile: the last quarter of the columns by polynomial."""
    hardware, polynomial = x.split([BLOCK_N * 3 // 4, BLOCK_N // 4], 1)
    return torch.cat([hardware.exp2(), polynomial_exp2(polynomial)], 1)


def lagging_maximum(m: Tensor, largest: Tensor) -> Tensor:
    """Return the rows' new maxima, as `exponentials.lagging_maximum`."""
    return torch.where(largest - m > LAG, largest, m)


class Tiles(NamedTuple):
    """Key tiles of some rows, as `hopper.pipeline.range_of_rows` returns them."""

    last: int
    count: int
    edge: int
    inside: int


@dataclasses.dataclass
class Sequence:
    """One sequence of a case, with the model's view of its memory.

    Attributes:
        rescaled: how often an output was rescaled, counted in tiles of 128 rows.
        largest_weight: the largest weight of any tile.
    """

    case: object
    index: int
    rescaled: int = 0
    largest_weight: float = 0.0

    def __post_init__(self) -> None:
        case, problem = self.case, self.case.problem
        self.q_len, self.num_keys = case.query_lens[self.index], case.seq_lens[self.index]
        self.q_start = sum(case.query_lens[: self.index])
        self.k_start = 0 if problem.block_size else sum(case.seq_lens[: self.index])
        self.group = heads_of_tile(problem.group_size)
        self.box = rows_of_token(self.group)
        self.window = problem.sliding_window or MOST_KEYS
        self.scale, self.softcap = exponents(problem)

    def range_of_rows(self, first_row: int, rows: int) -> Tiles:
        """Return the key tiles of some rows."""
        problem = self.case.problem
        history = self.num_keys - self.q_len
        lowest = history + first_row // self.box
        highest = history + min((first_row + rows - 1) // self.box, self.q_len - 1)
        stop = seen_by_all = self.num_keys
        if problem.causal:
            stop = max(min(highest + 1, self.num_keys), 0)
            seen_by_all = max(min(lowest + 1, self.num_keys), 0)
        last = -(-stop // BLOCK_N)
        first = clear = 0
        if problem.sliding_window:
            first = max(lowest - self.window + 1, 0) // BLOCK_N
            clear = -(-max(highest - self.window + 1, 0) // BLOCK_N)
        count = max(last - first, 0)
        edge = min(max(last - seen_by_all // BLOCK_N, 1), count)
        return Tiles(last, count, edge, max(min(last - clear, count), edge))

    @property
    def first_kept(self) -> int:
        """The first key in any query's window."""
        if not self.case.problem.sliding_window:
            return 0
        return max(self.num_keys - self.q_len - self.window + 1, 0)

    def queries(self, first_row: int, head: int) -> Tensor:
        """Return the queries of 128 rows; zeros past the ends of the tensor, as TMA fills in."""
        row = first_row + torch.arange(ROWS)
        token, query_head = self.q_start + row // self.box, head * self.group + row % self.box
        tokens, heads, _ = self.case.q.shape
        inside = (token < tokens) & (query_head < heads)
        found = self.case.q[token.clamp(max=tokens - 1), query_head.clamp(max=heads - 1)]
        return torch.where(inside[:, None], found, torch.zeros_like(found)).float()

    def rows_of_tile(self, start: int) -> Tensor:
        """Return the cache rows of a key tile; those of block 0 where the block table may be undefined."""
        if not isinstance(self.case, PagedCase):
            return self.k_start + start + torch.arange(BLOCK_N)
        size = self.case.problem.block_size
        page = min(size, BLOCK_N)
        rows = []
        for key in range(start, start + BLOCK_N, page):
            needed = key < self.num_keys and key + page > self.first_kept
            table = self.case.batch.block_table[self.index]
            block = int(table[key // size]) if needed else 0
            rows.append(block * size + key % size + torch.arange(page))
        return torch.cat(rows)

    def tile(self, start: int, head: int) -> tuple[Tensor, Tensor]:
        """Return a tile of keys and values, [128, D] each, of the key-value head that a group of heads attends."""
        shares = self.case.problem.group_size // self.group
        flat = self.case.kv[:, :, :, head // shares] if self.case.problem.block_size else None
        flat = flat.flatten(1, 2) if flat is not None else self.case.kv[:, :, head // shares]
        rows = self.rows_of_tile(start)
        inside = rows < flat.shape[1]
        found = flat[:, rows.clamp(max=flat.shape[1] - 1)]
        keys, values = torch.where(inside[:, None], found, torch.zeros_like(found)).float()
        return keys, values

    def attend(self, item: int, part: int, head: int) -> tuple[Tensor, Tensor]:
        """Return output [128, D] and log-sum-exp [128] of a softmax group's rows of an item, in float32."""
        problem, dtype = self.case.problem, self.case.q.dtype
        first_row = item * 2 * ROWS
        my_row = first_row + part * ROWS
        row = my_row + torch.arange(ROWS)
        last_seen = (
            self.num_keys
            - self.q_len
            + torch.minimum(row // self.box, torch.tensor(self.q_len - 1))
        )
        whole = self.range_of_rows(first_row, 2 * ROWS)
        last, count, edge, inside = self.range_of_rows(my_row, ROWS)
        count = count if my_row < self.q_len * self.box else 0
        assert count == 0 or 0 <= whole.last - last <= whole.count - count, "outside the item"
        q = self.queries(my_row, head)
        m, total = torch.full((ROWS,), -math.inf), torch.zeros(ROWS)
        output = torch.full((ROWS, problem.head_dim), math.nan)
        for i in range(count):
            start = (last - 1 - i) * BLOCK_N
            keys, values = self.tile(start, head)
            if i == 0:
                values[max(self.num_keys - start, 0) :] = 0.0
            if problem.sliding_window and i == count - 1:
                values[: max(self.first_kept - start, 0)] = 0.0
            s = q @ keys.T
            factor = self.scale
            if problem.softcap:
                s, factor = self.softcap - 2.0 * self.softcap / ((s * self.scale).exp2() + 1.0), 1.0
            if i < edge or i >= inside:
                s = self.mask(s, start, last_seen)
            new_m = lagging_maximum(m, s.amax(1) * factor)
            base = torch.where(new_m == -math.inf, 0.0, new_m)
            fade = (m - base).exp2()
            if i > 0 and bool((new_m > m).any()):
                self.rescaled += 1
                output = output * fade[:, None]
            m = new_m
            e = exponentials_of(s * factor - base[:, None])
            self.largest_weight = max(self.largest_weight, float(e.nan_to_num().max()))
            product = e.to(dtype).float() @ values
            output = product if i == 0 else output + product
            total = total * fade + e.sum(1)
        nothing = total == 0.0
        inverse = 1.0 / torch.where(nothing, 1.0, total)
        output = torch.where(nothing[:, None], 0.0, output * inverse[:, None])
        log_sum = torch.where(nothing, -math.inf, m + torch.where(nothing, 1.0, total).log2())
        return output, log_sum * math.log(2)

    def mask(self, s: Tensor, start: int, last_seen: Tensor) -> Tensor:
        """Set the scores of keys that a row does not see to -inf."""
        column = torch.arange(BLOCK_N)[None, :]
        limit = (last_seen - start)[:, None]
        seen = column <= limit if self.case.problem.causal else column < self.num_keys - start
        if self.case.problem.sliding_window:
            seen = seen & (column > limit - self.window)
        return torch.where(seen, s, -math.inf)


def attend(case: object) -> tuple[Tensor, Tensor, list[Sequence]]:
    """Return a case's output [T, H, D], its log-sum-exp [T, H], and what happened in each sequence."""
    out = torch.full_like(case.q, math.nan)
    lse = torch.full(case.q.shape[:2], math.nan)
    sequences = [Sequence(case, index) for index in range(len(case.query_lens))]
    for seq in sequences:
        items = -(-seq.q_len * seq.box // (2 * ROWS))
        for head in range(case.problem.num_heads // seq.group):
            for item in range(items):
                for part in range(2):
                    values, log_sum = seq.attend(item, part, head)
                    row = (2 * item + part) * ROWS + torch.arange(ROWS)
                    exists = (row // seq.box < seq.q_len) & (row % seq.box < seq.group)
                    token = (seq.q_start + row // seq.box)[exists]
                    query_head = (head * seq.group + row % seq.box)[exists]
                    out[token, query_head] = values[exists].to(out.dtype)
                    lse[token, query_head] = log_sum[exists]
    return out, lse, sequences
