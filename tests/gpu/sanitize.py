"""Runs every code path of the attention kernels once on small shapes, for NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \
        python -m tests.gpu.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.gpu.sanitize

Without PyTorch's caching allocator, an access past the end of a tensor leaves its allocation, so that
memcheck detects it. The cases: several splits and their merge, a single split, window, softcap, a head
dim of two parts, several row tiles, packed keys, a batch without keys, work items without keys, a shared
prefix, and writes with skipped slots. The results are compared with the reference too. About 24
compilations; run it once without the sanitizer to fill the compiler's cache.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import torch

import kernels
from kernels.attention.problem import Phase
from kernels.testing import reference
from tests.gpu.attention_cases import DEVICE, judge, make, make_problem, rows, run

PREFILL_CASES = [
    (("bfloat16", 8, 2, 128, 16, {"lse": True}), [70, 1, 0, 33, 5], [70, 200, 9, 300, 2]),
    (("float16", 7, 1, 80, 48, {"sliding_window": 20, "softcap": 15.0}), [40, 65], [90, 65]),
    (("float32", 6, 2, 64, 16, {}), [17, 40], [100, 40]),
    (("bfloat16", 6, 6, 64, None, {"causal": False}), [50, 30], [80, 0]),
    (("bfloat16", 8, 2, 64, 32, {"sliding_window": 150, "lse": True}), [230, 1, 3], [400, 0, 3]),
    (("float16", 8, 1, 256, 16, {"softcap": 15.0}), [65, 1, 20], [300, 0, 20]),
]
DECODE_CASES = [
    (("bfloat16", 8, 2, 128, 16, {"lse": True}), [1, 1, 1, 1], [1500, 1, 0, 300]),
    (("float16", 7, 1, 80, 48, {"sliding_window": 200}), [1, 1], [900, 33]),
    (("bfloat16", 8, 1, 64, 16, {"max_query_tokens": 4}), [4, 2, 1], [700, 2, 40]),
    (("float32", 6, 2, 192, 64, {"softcap": 15.0}), [1], [400]),
    (("bfloat16", 8, 2, 128, 16, {"batch_invariant": True}), [1, 1], [5000, 30]),
]
SHARED_PREFIX_CASES = [
    # The last number: tokens of the shared prefix. One sequence of the first case has no tokens.
    (("bfloat16", 8, 2, 128, 16, {"lse": True}), [1] * 5, [401, 500, 0, 416, 1000], 400),
    (("float16", 7, 1, 80, 48, {"softcap": 15.0, "max_query_tokens": 3}), [3, 1], [99, 200], 96),
]


def attend_all() -> int:
    """Run every GPU row twice on every case that it supports; return the number of runs."""
    runs = 0
    decode = [(*case, 0) for case in DECODE_CASES] + SHARED_PREFIX_CASES
    prefill = [(*case, 0) for case in PREFILL_CASES]
    for phase, cases in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)):
        for row in (parameter.values[0] for parameter in rows(phase)):
            for combination, queries, keys, prefix in cases:
                problem = make_problem(phase, combination)
                if row.unsupported(problem, kernels.detect(DEVICE)):
                    continue
                options = {"shared_prefix": prefix} if prefix else {}
                case = make(problem, queries, keys, **options)
                out, lse = run(row, case)
                # The reference runs on the CPU, so that the sanitizer checks only our kernels.
                host = dataclasses.replace(case, q=case.q.cpu(), kv=case.kv.cpu())
                judge(host, out.cpu(), None if lse is None else lse.cpu())
                again, _ = run(row, case)
                assert torch.equal(out, again), f"{row.name} differs between two runs"
                runs += 2
    return runs


def write() -> None:
    """Write keys and values with some slots skipped."""
    for dtype, heads, head_dim in ((torch.bfloat16, 8, 128), (torch.float32, 3, 80)):
        kv = torch.zeros((2, 4, 16, heads, head_dim), dtype=dtype, device=DEVICE)
        k, v = torch.randn((2, 5, heads, head_dim), device=DEVICE).to(dtype)
        slots = [63, -1, 0, 17, -1]
        expected = reference.write_kv(k, v, kv, slots)
        kernels.write_kv(k, v, kv, torch.tensor(slots, dtype=torch.int32, device=DEVICE))
        assert torch.equal(kv, expected)


def main() -> None:
    """Run all cases; the sanitizer reports its findings itself."""
    begin = time.monotonic()
    runs = attend_all()
    write()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert runs > 0
    sys.stdout.write(f"{runs} attention runs and 2 writes, {time.monotonic() - begin:.0f} s\n")


if __name__ == "__main__":
    main()
