"""Problems of attention for training, and their truth: dense attention in float64 with PyTorch's derivatives."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kernels.attention.training.block_mask import BlockMask
from kernels.attention.training.philox import drop_below, random_bits


@dataclass(frozen=True)
class Case:
    """One problem: lengths of the sequences, heads, and the arguments of `flash_attention`."""

    queries: tuple[int, ...] = (40, 1, 33)
    keys: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    alibi: bool = False
    alibi_by_sequence: bool = False
    tiles: tuple[torch.Tensor, int, int] | None = None
    options: dict = field(default_factory=dict)

    def __str__(self):
        shape = f"{self.heads}-{self.kv_heads}-{self.head_dim}"
        extra = ["alibi"] * self.alibi + ["by sequence"] * self.alibi_by_sequence
        extra += ["tiles"] * (self.tiles is not None)
        named = [f"{name}={value}" for name, value in self.options.items()]
        lengths = "+".join(map(str, self.queries))
        if self.keys:
            lengths += " on " + "+".join(map(str, self.keys))
        return " ".join([shape, lengths, *extra, *named]).replace("=", " ")

    def inputs(self, dtype, device="cpu"):
        """Return q, k, v and the gradients of both results."""
        generator = torch.Generator().manual_seed(0)
        num_q, num_k = sum(self.queries), sum(self.keys or self.queries)

        def random(*shape):
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        q = random(num_q, self.heads, self.head_dim)
        k, v = (random(num_k, self.kv_heads, self.head_dim) for _ in range(2))
        return (
            q,
            k,
            v,
            random(num_q, self.heads, self.head_dim),
            torch.randn(num_q, self.heads).to(device),
        )

    def arguments(self, device="cpu"):
        """Return the keyword arguments of `flash_attention`."""
        found = dict(self.options, cu_seqlens_q=starts(self.queries, device), return_lse=True)
        if self.keys is not None:
            found["cu_seqlens_k"] = starts(self.keys, device)
        if self.alibi:
            found["alibi_slopes"] = self.slopes().to(device)
        if self.tiles is not None:
            tiles, *sizes = self.tiles
            found["block_mask"] = BlockMask.from_tiles(tiles.to(device), *sizes)
        return found

    def slopes(self):
        """Return the slopes of ALiBi, [H] or [B, H]."""
        heads = 2.0 ** -torch.arange(1, self.heads + 1, dtype=torch.float32)
        if not self.alibi_by_sequence:
            return heads
        return heads * torch.arange(1, len(self.queries) + 1)[:, None]


def starts(lengths, device="cpu"):
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(torch.int32).to(device)


def dense(case, q, k, v):
    """Compute a case by its definition, in the dtype of the inputs; returns out and lse."""
    outs, sums = [], []
    lengths = zip(case.queries, case.keys or case.queries, strict=True)
    first_q = first_k = 0
    for number, (num_q, num_k) in enumerate(lengths):
        rows, columns = slice(first_q, first_q + num_q), slice(first_k, first_k + num_k)
        first_q, first_k = first_q + num_q, first_k + num_k
        out, lse = _sequence(case, number, q[rows], k[columns], v[columns])
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs), torch.cat(sums)


def _sequence(case, number, q, k, v):
    options = case.options
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = options.get("softmax_scale", case.head_dim**-0.5)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * scale
    if "softcap" in options:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    rows = torch.arange(len(q), device=q.device)[:, None]
    columns = torch.arange(len(k), device=q.device)
    distance = rows + len(k) - len(q) - columns
    if case.alibi:
        slopes = case.slopes().expand(len(case.queries), -1)[number]
        bias = slopes.to(q.device, q.dtype)[:, None, None] * distance.abs()
        scores = scores - bias
    unseen = torch.zeros_like(distance, dtype=torch.bool)
    if options.get("causal", True):
        unseen |= distance < 0
    if "sliding_window" in options:
        unseen |= distance >= options["sliding_window"]
    if case.tiles is not None:
        tiles, height, width = case.tiles
        unseen |= ~tiles.to(q.device)[rows // height, columns // width]
    scores = scores.masked_fill(unseen, -torch.inf)
    blind = unseen.all(1)[None, :, None]
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    if options.get("dropout_p"):
        heads = torch.arange(case.heads, device=q.device)[:, None, None]
        bits = random_bits(options.get("dropout_seed", 0), columns, rows, heads, number)
        weights = weights * (bits >= drop_below(options["dropout_p"])) / (1 - options["dropout_p"])
    return torch.einsum("hmn,nhd->mhd", weights, v), scores.logsumexp(-1).T


TILES = (torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) < 0.6, 32, 32)
CASES = [
    Case(),
    Case(queries=(1,)),
    Case(queries=(40, 0, 7), keys=(70, 5, 0)),
    Case(queries=(70, 30), keys=(50, 30)),
    Case(queries=(40, 5), keys=(40, 50), options={"causal": False}),
    Case(queries=(70, 30), keys=(90, 30), options={"sliding_window": 20}),
    Case(options={"sliding_window": 1}),
    Case(options={"softcap": 3.0}),
    Case(alibi=True),
    Case(alibi=True, options={"causal": False, "softcap": 5.0}),
    Case(alibi=True, alibi_by_sequence=True),
    Case(
        queries=(40, 5),
        keys=(30, 50),
        alibi=True,
        alibi_by_sequence=True,
        options={"causal": False},
    ),
    Case(options={"dropout_p": 0.3, "dropout_seed": (1 << 40) + 12345}),
    Case(queries=(90, 30), keys=(120, 33), tiles=TILES, options={"causal": False}),
    Case(queries=(90, 30), keys=(120, 33), tiles=TILES, options={"dropout_p": 0.1}),
    Case(options={"softmax_scale": 0.7}),
    *(
        Case(queries=(37,), heads=heads, kv_heads=kv)
        for heads, kv in ((6, 1), (3, 3), (8, 1), (10, 2))
    ),
    *(Case(queries=(37,), head_dim=size) for size in (16, 48, 64, 80)),
]
