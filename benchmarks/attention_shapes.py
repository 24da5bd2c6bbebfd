"""The shapes that attention is measured on, and what other kernels were measured to take on them.

Data only: no tensor is made here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PEERS_SOURCE = (
    "medians of triton.testing.do_bench on another NVIDIA H100 80GB HBM3, torch 2.11.0+cu130: FA3 is "
    "vLLM 0.23.0's build, FlashInfer is 0.6.12, cuDNN and FA2 are PyTorch's SDPA"
)
"""Where the figures in `Shape.peers` come from: the same kind of machine, but not the same run."""
ELEMENT_BYTES = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})


@dataclass(frozen=True, slots=True)
class Shape:
    """One row of a table: equally long sequences of one model's attention.

    Attributes:
        phase: "prefill" or "decode".
        hq: query heads.
        hkv: key-value heads.
        d: head dim.
        batch: sequences.
        length: tokens of each; in a decode the one being decoded included.
        peers: other kernels' figures, measured elsewhere (`PEERS_SOURCE`): TFLOP/s in a prefill,
            microseconds in a decode.
    """

    phase: str
    hq: int
    hkv: int
    d: int
    batch: int
    length: int
    peers: Mapping[str, float] = field(default_factory=dict, hash=False, compare=False)

    def __str__(self) -> str:
        """As in `decode 32/8/128 8x1024`."""
        return f"{self.phase} {self.heads} {self.batch}x{self.length}"

    @property
    def heads(self) -> str:
        """As in `32/8/128`."""
        return f"{self.hq}/{self.hkv}/{self.d}"

    @property
    def query_len(self) -> int:
        """Query tokens of each sequence."""
        return self.length if self.phase == "prefill" else 1

    @property
    def flops(self) -> float:
        """Floating-point operations of the call; the causal half of a square prefill."""
        if self.phase == "prefill":
            return 4 * self.length**2 * self.d * self.hq * 0.5 * self.batch
        return 4 * self.length * self.d * self.hq * self.batch

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of keys and values that the call has to read once."""
        return 2 * self.batch * self.length * self.hkv * self.d * ELEMENT_BYTES[dtype]

    @property
    def bar(self) -> float | None:
        """The best of the peers: highest TFLOP/s, lowest microseconds; None without any."""
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
    },
)
TINY = (Shape("prefill", 4, 2, 32, 2, 48), Shape("decode", 4, 2, 32, 2, 48))
"""For a dry run of the scripts in Triton's interpreter."""


def find(phase: str, heads: tuple[int, int, int], batch: int, length: int) -> Shape:
    """The shape with its peers' figures where a table has it, else without."""
    wanted = Shape(phase, *heads, batch, length)
    return next((shape for shape in (*PREFILL, *DECODE) if shape == wanted), wanted)
