"""The dtypes that a cache, or weights, may be quantised to, and which caches a kernel reads.

Knows nothing of how numbers are quantised: `kernels/fp8.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.attention.problem import AttentionProblem

FP8 = "float8_e4m3fn"
"""Of a cache with a float32 scale for each key and each value of a head (docs/decisions/0016-fp8-kv-cache.md), or of
weights with one for each output (docs/decisions/0021-fp8-weights.md)."""
SCALE_BYTES = 4
"""Of the float32 beside each of them."""
KV_DTYPES = (FP8,)
"""What a cache may be quantised to; else it has the queries' dtype."""


@dataclass(frozen=True, slots=True)
class QuantisedCache:
    """What a row takes beside a cache of the queries' own dtype.

    Attributes:
        kv_dtypes: of the cache.
        dtypes: of the queries over such a cache.
        first_sm: lowest compute capability on which it reads one.
        note: why not on lower ones, for the refusal.
    """

    kv_dtypes: frozenset[str]
    dtypes: frozenset[str]
    first_sm: int = 0
    note: str = ""

    def refuse(self, problem: AttentionProblem, arch: GPUArch) -> tuple[str, ...]:
        """List every reason why such a cache cannot be read; for a problem that has one."""
        reasons = []
        if problem.kv_dtype not in self.kv_dtypes:
            reasons.append(f"no {problem.kv_dtype} cache")
        if problem.dtype not in self.dtypes:
            reasons.append(f"no {problem.dtype} queries over a {problem.kv_dtype} cache")
        if not arch.is_cpu and arch.sm < self.first_sm:
            text = f"reads a {problem.kv_dtype} cache from sm_{self.first_sm} on"
            reasons.append(f"{text} ({self.note})" if self.note else text)
        return tuple(reasons)
