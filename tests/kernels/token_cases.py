"""Steps of one token a sequence for one launch from projection to attention, on any device."""

from __future__ import annotations

import torch

import kernels
from kernels import PagedBatch, Phase, reference
from kernels.fused.attend_token import TokenRoom, attend_tokens
from kernels.fused.rope_cache import rope_and_write_kv
from kernels.plan import AttentionProblem
from kernels.testing import UNUSED_BLOCK, assert_no_worse_than, truth_dtype

BLOCK_SIZE = 16
EPS = 1e-5


class TokenCase:
    """Sequences with a projected token each; what must not be read is not a number, or no block."""

    def __init__(
        self, lengths, heads, kv_heads, head_dim, dtype, *, norms=True, device="cpu", **changes
    ):
        generator = torch.Generator(device).manual_seed(1)

        def random(*shape):
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.lengths, self.kv_heads = lengths, kv_heads
        self.problem = AttentionProblem(
            phase=Phase.DECODE,
            dtype=str(dtype).removeprefix("torch."),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=BLOCK_SIZE,
            softmax_scale=head_dim**-0.5,
            **changes,
        )
        window = self.problem.sliding_window or max(lengths)
        # Blocks that no window reaches may be anything.
        firsts = [max(0, length - window) // BLOCK_SIZE for length in lengths]
        stops = [-(-length // BLOCK_SIZE) for length in lengths]
        host = torch.Generator().manual_seed(2)
        blocks = torch.randperm(sum(stops) + 1, generator=host).int()
        table = torch.full((len(lengths), max(stops) + 1), UNUSED_BLOCK, dtype=torch.int32)
        self.kv = torch.full(
            (2, len(blocks), BLOCK_SIZE, kv_heads, head_dim),
            float("nan"),
            dtype=dtype,
            device=device,
        )
        slots, self.places, taken = [], [], 0
        for row, (length, first, stop) in enumerate(zip(lengths, firsts, stops, strict=True)):
            mine = blocks[taken : taken + stop]
            taken += stop
            table[row, first:stop] = mine[first:]
            key = torch.arange(length)
            place = (mine[key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE).long().to(device)
            self.places.append(place)
            slots.append(int(place[-1]) if length else -1)
            earlier = place[first * BLOCK_SIZE : -1]
            self.kv.flatten(1, 2)[:, earlier] = random(2, len(earlier), kv_heads, head_dim)
        rows = len(lengths)
        self.batch = PagedBatch(
            torch.arange(rows + 1, dtype=torch.int32, device=device),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            table.to(device),
            num_tokens=rows,
            max_seqlen_q=1,
            max_seqlen_k=max(lengths),
        )
        size = (heads + 2 * kv_heads) * head_dim
        self.qkv = torch.full((rows, size + 16), float("nan"), dtype=dtype, device=device)[:, :size]
        self.qkv.copy_(random(rows, size) * 2)
        self.qkv[[row for row, length in enumerate(lengths) if not length]] = float("nan")
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self.positions = torch.tensor([max(length - 1, 0) for length in lengths], device=device)
        angles = torch.rand(max(lengths) + 1, head_dim // 2, generator=host) * 100
        self.rope = tuple(table.to(device) for table in kernels.rope_tables(angles, dtype=dtype))
        self.norms = (random(head_dim), random(head_dim)) if norms else None

    def room(self, launch):
        programs, group = len(self.lengths) * self.kv_heads, self.problem.group_size
        parts, device = programs * launch.splits, self.qkv.device
        return TokenRoom(
            torch.zeros(programs, dtype=torch.int32, device=device),
            torch.full((parts, group, self.problem.head_dim), float("nan"), device=device),
            torch.full((parts, group), float("nan"), device=device),
        )

    def run(self, launch, room=None, **named):
        """Compute it in one launch; the cache is extended."""
        return attend_tokens(
            self.qkv, self.kv, self.rope, self.positions, self.slots, self.batch, self.problem, launch,
            room or self.room(launch), norms=self.norms, eps=EPS, **named,
        )  # fmt: skip

    def two_launches(self):
        """Return queries and cache as two launches make them, in memory of their own."""
        kv = self.kv.clone()
        q = rope_and_write_kv(
            self.qkv.clone(), kv, self.rope, self.positions, self.slots, norms=self.norms, eps=EPS
        )
        return q, kv

    def check(self, launch, **named):
        """Compute it and compare with the reference by `assert_no_worse_than`, the cache to the bit."""
        q, kv = self.two_launches()
        out = self.run(launch, **named)
        torch.testing.assert_close(self.kv, kv, rtol=0, atol=0, equal_nan=True)
        truth, plain = (self._attend(q, kv, dtype) for dtype in (truth_dtype(out.dtype), out.dtype))
        assert_no_worse_than(out, truth, plain)
        return out

    def _attend(self, q, kv, dtype):
        rules = {
            name: getattr(self.problem, name)
            for name in ("softmax_scale", "sliding_window", "softcap", "causal")
        }
        flat = kv.flatten(1, 2)
        rows = [
            reference.attention(q[row : row + 1], *flat[:, place], **rules, dtype=dtype)
            if len(place)
            else torch.zeros_like(q[:1], dtype=dtype)
            for row, place in enumerate(self.places)
        ]
        return torch.cat(rows)
