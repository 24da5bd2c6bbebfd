"""The shapes of the attention benchmarks, with published figures of other kernels."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PEERS_SOURCE = (
    "medians of triton.testing.do_bench on another NVIDIA H100 80GB HBM3, torch 2.11.0+cu130: FA3 is "
    "vLLM 0.23.0's build, FlashInfer is 0.6.12, cuDNN and FA2 are PyTorch's SDPA"
)
"""Source of the figures in `Shape.peers`: the same GPU model, but another run."""
ELEMENT_BYTES = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of a table. All sequences have the same length unless `lengths` is given.

    Attributes:
        phase: "prefill" or "decode".
        hq: number of query heads.
        hkv: number of key-value heads.
        d: head dim.
        batch: number of sequences.
        length: tokens of each sequence, or of the longest; in a decode including the token being decoded.
        peers: figures of other kernels, measured elsewhere (`PEERS_SOURCE`): TFLOP/s for prefill, microseconds for
            decode.
        history: tokens of each sequence that are in the cache before a prefill.
        causal: whether queries attend only to keys up to their own token.
        window: number of tokens that a query attends to; None for all.
        lengths: tokens of each sequence, if they differ.
        shared: leading tokens that all sequences of a decode share, in the same blocks.
    """

    phase: str
    hq: int
    hkv: int
    d: int
    batch: int
    length: int
    peers: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)
    history: int = 0
    causal: bool = True
    window: int | None = None
    lengths: tuple[int, ...] = ()
    shared: int = 0

    def __str__(self) -> str:
        """Format as in `decode 32/8/128 8x1024`."""
        return f"{self.phase} {self.heads} {self.size}"

    @property
    def heads(self) -> str:
        """Format as in `32/8/128`."""
        return f"{self.hq}/{self.hkv}/{self.d}"

    @property
    def size(self) -> str:
        """Format as in `8x1024`; `1x512+8192` with a history, `64x(100-16000)` with different lengths.

        With shared leading blocks the format is `64x(8192 shared + 128)`.
        """
        new = str(self.length - self.history)
        if self.lengths:
            new = f"({min(self.lengths)}-{max(self.lengths)})"
        if self.shared:
            new = f"({self.shared} shared + {self.length - self.shared})"
        text = f"{self.batch}x{new}"
        text += f"+{self.history}" if self.history else ""
        text += "" if self.causal else " full"
        return text if self.window is None else f"{text} w{self.window}"

    def record(self) -> dict[str, str | int]:
        """Return the entries of a result's row."""
        length = "seqlen" if self.phase == "prefill" else "context"
        sizes = {"hq": self.hq, "hkv": self.hkv, "d": self.d, "batch": self.batch}
        return {"phase": self.phase, **sizes, length: self.length}

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Number of keys of each sequence."""
        return self.lengths or (self.length,) * self.batch

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Number of query tokens of each sequence."""
        if self.phase == "decode":
            return (1,) * self.batch
        return tuple(length - self.history for length in self.seq_lens)

    @property
    def flops(self) -> float:
        """Floating-point operations of the call.

        As usual, a causal square counts half.
        """
        pairs = zip(self.query_lens, self.seq_lens, strict=True)
        return 4 * self.d * self.hq * sum(self._seen(queries, keys) for queries, keys in pairs)

    def _seen(self, queries: int, keys: int) -> float:
        """Return the number of (query, key) pairs in one sequence for which the query attends to the key."""
        if self.phase == "decode":
            return keys
        if not self.causal:
            return queries * keys
        if self.window is None:
            return queries * (keys - queries) + 0.5 * queries**2
        # Queries within the first window see all keys before them, later ones only the window.
        growing = min(max(self.window - (keys - queries), 0), queries)
        first = keys - queries
        return growing * first + 0.5 * growing**2 + (queries - growing) * self.window

    def kv_bytes(self, dtype: str) -> int:
        """Return the bytes of all keys and values, each read once."""
        tokens = sum(self.seq_lens) - max(0, self.batch - 1) * self.shared
        return 2 * tokens * self.hkv * self.d * ELEMENT_BYTES[dtype]

    @property
    def bar(self) -> float | None:
        """The best figure of the peers: highest TFLOP/s, lowest microseconds; None without peers."""
        if not self.peers:
            return None
        return max(self.peers.values()) if self.phase == "prefill" else min(self.peers.values())


_PREFILL_PEERS = ("fa3", "cudnn", "flashinfer", "fa2")
_DECODE_PEERS = ("fa3", "flashinfer")


def _table(
    phase: str,
    peers: tuple[str, ...],
    groups: dict[tuple[int, int, int], list[tuple[float, ...]]],
) -> tuple[Shape, ...]:
    return tuple(
        Shape(phase, *heads, int(batch), int(length), dict(zip(peers, figures, strict=True)))
        for heads, rows in groups.items()
        for batch, length, *figures in rows
    )


PREFILL = _table(
    "prefill",
    _PREFILL_PEERS,
    {
        (32, 8, 128): [
            (32, 512, 297, 361, 325, 197),
            (16, 1024, 410, 446, 452, 255),
            (4, 4096, 624, 591, 573, 305),
            (1, 16384, 648, 577, 663, 338),
        ],
        (32, 8, 64): [
            (32, 512, 183, 257, 195, 153),
            (16, 1024, 290, 335, 261, 215),
            (4, 4096, 475, 428, 424, 282),
            (1, 16384, 507, 438, 467, 303),
        ],
        (16, 8, 128): [
            (32, 512, 248, 329, 298, 180),
            (16, 1024, 377, 424, 421, 247),
            (4, 4096, 610, 545, 579, 298),
            (1, 16384, 635, 617, 627, 315),
        ],
    },
)
DECODE = _table(
    "decode",
    _DECODE_PEERS,
    {
        (32, 8, 128): [
            (1, 1024, 14.8, 13.8),
            (1, 16384, 44.2, 44.4),
            (1, 131072, 204, 202),
            (8, 1024, 27.5, 29.5),
            (8, 8192, 111, 112),
            (32, 1024, 67.8, 65.2),
            (32, 4096, 197, 198),
            (128, 1024, 205, 200),
            (128, 4096, 724, 726),
            (256, 1024, 383, 376),
        ],
        (32, 8, 64): [
            (1, 1024, 12.8, 14.2),
            (1, 16384, 28.7, 30.1),
            (1, 131072, 117, 119),
            (8, 1024, 19.8, 21.9),
            (8, 8192, 67.1, 70.7),
            (32, 1024, 45.0, 42.6),
            (32, 4096, 114, 116),
            (128, 1024, 123, 117),
            (128, 4096, 394, 396),
            (256, 1024, 224, 213),
        ],
        (16, 8, 128): [
            (1, 1024, 15.5, 14.5),
            (1, 16384, 44.1, 44.0),
            (1, 131072, 205, 202),
            (8, 1024, 27.4, 29.2),
            (8, 8192, 110, 112),
            (32, 1024, 66.8, 65.1),
            (32, 4096, 197, 198),
            (128, 1024, 203, 199),
            (128, 4096, 723, 726),
            (256, 1024, 380, 375),
        ],
    },
)


def _sampled(count: int, least: int, most: int, sample: Callable[[random.Random], float]) -> Shape:
    """Return a decode with sampled lengths, the same in every run; `replace` derives other shapes from it."""
    source = random.Random(0)
    lengths = tuple(min(most, max(least, round(sample(source)))) for _ in range(count))
    return Shape("decode", 32, 8, 128, count, max(lengths), lengths=lengths)


def _prompt_length(source: random.Random) -> float:
    """Sample the length of a chat prompt: half have fewer than 150 tokens, one in a hundred more than 2000."""
    return source.lognormvariate(5.0, 1.15)


def _skewed(source: random.Random) -> float:
    """Sample a context length between 100 and 16384 tokens: half have fewer than 1300."""
    return math.exp(source.uniform(math.log(100), math.log(16384)))


_MIX = _sampled(96, 4, 4096, _prompt_length)
MORE_PREFILL = (
    *(replace(_MIX, phase="prefill", d=d) for d in (128, 64)),
    *(Shape("prefill", 32, 8, 128, 1, history + 512, history=history) for history in (8192, 32768)),
    *(
        Shape("prefill", 16, 4, 256, batch, length)
        for batch, length in ((16, 1024), (4, 4096), (1, 16384))
    ),
    *(
        Shape("prefill", 32, 8, d, batch, length, causal=False)
        for d in (128, 64)
        for batch, length in ((16, 1024), (4, 4096), (1, 16384))
    ),
    Shape("prefill", 32, 8, 128, 4, 4096, window=1024),
    Shape("prefill", 32, 8, 128, 1, 16384, window=4096),
)
"""Rows that are not in the peers' tables: prompts of different lengths as in chats, chunks of 512 tokens after a
history, head dim 256, full attention, windows."""
MORE_DECODE = (
    _sampled(64, 100, 16384, lambda source: source.uniform(100, 16384)),
    _sampled(64, 100, 16384, _skewed),
)
"""Batches of different contexts: uniform, and mostly short ones."""
SHARED_DECODE = (
    Shape("decode", 32, 8, 128, 64, 8192 + 128, shared=8192),
    Shape("decode", 32, 8, 128, 16, 2048 + 512, shared=2048),
    Shape("decode", 32, 8, 128, 256, 1024 + 256, shared=1024),
)
"""Sequences with a common prefix."""
FEW_HEADS = tuple(
    Shape("decode", *heads, 64, batch, length)
    for heads in ((9, 3), (32, 8), (14, 2), (32, 4))
    for batch, length in ((64, 184), (256, 184), (64, 512), (256, 512), (128, 4096))
)
"""Decodes of small models: 3, 4, 7 and 8 query heads for each key-value head, as SmolLM2, Llama 3.2, Qwen2.5 and
TinyLlama have them."""
SHORT = tuple(
    Shape("decode", *heads, 128, batch, length)
    for heads in ((16, 8), (12, 2), (32, 8))
    for batch, length in ((8, 256), (64, 184), (64, 256), (64, 512), (256, 184), (256, 256))
)
"""Decodes of short sequences with a head dim of 128: 2, 6 and 4 query heads for each key-value head, as Qwen3-0.6B,
Qwen2.5-1.5B and Llama-3.1-8B have them."""
_LENGTHS_TOKENS = 16384
LENGTHS = tuple(
    Shape("prefill", 16, 16, 128, max(1, _LENGTHS_TOKENS // length), length)
    for length in (2**power for power in range(7, 18))
)
"""Prefill by length, from 128 to 131,072 tokens, of equal work for the parts that grow with the tokens alone."""
TINY_LENGTHS = tuple(Shape("prefill", 2, 2, 32, 64 // length, length) for length in (16, 32, 64))
TINY = (
    Shape("prefill", 4, 2, 32, 2, 48),
    Shape("prefill", 4, 2, 32, 1, 48, history=32),
    Shape("prefill", 4, 2, 32, 3, 40, lengths=(3, 40, 17)),
    Shape("prefill", 4, 2, 32, 2, 48, causal=False),
    Shape("prefill", 4, 2, 32, 2, 48, window=20),
    Shape("decode", 4, 2, 32, 2, 48),
    Shape("decode", 4, 2, 32, 3, 90, lengths=(90, 5, 33)),
    Shape("decode", 4, 2, 32, 3, 90, shared=64),
)
"""Shapes for a dry run of the scripts in Triton's interpreter."""


def find(phase: str, heads: tuple[int, int, int], batch: int, length: int) -> Shape:
    """Return a shape, with its peers' figures if it is in a table."""
    wanted = Shape(phase, *heads, batch, length)
    return next((shape for shape in (*PREFILL, *DECODE) if shape == wanted), wanted)
