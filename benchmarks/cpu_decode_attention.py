"""How should the CPU attend over the paged cache: gather it, or read it where it lies?

Times one layer's call, Python included, for each way and for what the plan chooses, and the ways of a
prefill chunk. One thread is timed by its own clock, so that a busy machine does not blur it. Two threads
are timed by the wall clock, and one process on either core costs them milliseconds a call: a problem on
which the system took a core away is measured again after a while, and its rows say `"disturbed": true`
if it never was undisturbed.

    python -m benchmarks.cpu_decode_attention [--seconds 0.1] [--threads 1 2] [--patience 300]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

import kernels
from benchmarks.report import write_report
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.pytorch.decode import TorchDecode
from kernels.testing.problems import Layout, PagedCase, make_case

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {"bundled": (6, 2, 64), "qwen3-0.6b": (16, 8, 128)}
RAGGED = [2048, 64, 700, 128, 1024, 90, 300, 512]
MICRO = 1e6
MOST_SWITCHES_PER_SECOND = 40
"""Involuntary context switches above which other processes compete for the cores: an idle machine has
below 10, a contended one above 200."""


def naive_decode(case: PagedCase) -> Callable[[], object]:
    """Gather whole blocks into a padded batch, mask the rest, let SDPA share the heads."""
    longest = max(case.seq_lens)
    block_size = case.kv.shape[2]
    blocks = -(-longest // block_size)
    table = case.batch.block_table[:, :blocks].clamp(max=case.kv.shape[1] - 1).long()
    visible = torch.arange(blocks * block_size)[None] < case.batch.seq_lens[:, None]
    mask = visible[:, None, None]
    unseen = ~visible[..., None, None]
    out = torch.empty_like(case.q)

    def run() -> None:
        keys, values = (
            side[table].flatten(1, 2).masked_fill_(unseen, 0).transpose(1, 2) for side in case.kv
        )
        query = case.q[:, :, None]
        result = functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            scale=case.problem.softmax_scale,
            enable_gqa=True,
        )
        out.copy_(result[:, :, 0])

    return run


def forced_decode(case: PagedCase, call_bytes: int) -> Callable[[], object]:
    """Read every run in place (0), or gather all sequences (a large number)."""
    kernel = TorchDecode(case.problem, case.batch, None, call_bytes)
    out = torch.empty_like(case.q)
    return lambda: kernel(case.q, case.kv, out)


def chosen(case: PagedCase) -> Callable[[], object]:
    """What the plan does, through the door."""
    plan = kernels.plan_attention(case.problem, case.batch)
    out = torch.empty_like(case.q)
    attend = kernels.prefill_attention
    if case.problem.phase is Phase.DECODE:
        attend = kernels.decode_attention
    return lambda: attend(case.q, case.kv, plan, out)


def sdpa_prefill(case: PagedCase) -> Callable[[], object]:
    """One SDPA over a contiguous copy of the history, with a boolean mask if there is history."""
    (queries,), (keys,) = case.query_lens, case.seq_lens
    history = keys - queries
    mask = None
    if history:
        mask = torch.arange(keys)[None] <= torch.arange(history, keys)[:, None]
    table = case.batch.block_table[0].long()
    out = torch.empty_like(case.q)

    def run() -> None:
        k, v = (side[table].flatten(0, 1)[:keys].transpose(0, 1)[None] for side in case.kv)
        result = functional.scaled_dot_product_attention(
            case.q.transpose(0, 1)[None],
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=case.problem.softmax_scale,
            enable_gqa=True,
        )
        out.copy_(result[0].transpose(0, 1))

    return run


class Stopwatch:
    """Times ways side by side.

    Attributes:
        seconds: for each way of a problem.
        patience: seconds left for measuring disturbed problems again.
    """

    def __init__(self, seconds: float, patience: float) -> None:
        self.seconds = seconds
        self.patience = patience

    def measure(self, ways: dict[str, Callable[[], object]]) -> dict[str, dict[str, Any]]:
        """Time the ways in turn, round by round; microseconds of the best and the median round."""
        while True:
            start = time.perf_counter()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            rounds = self._rounds(ways)
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before
            rate = switches / (time.perf_counter() - start)
            disturbed = torch.get_num_threads() > 1 and rate > MOST_SWITCHES_PER_SECOND
            if not disturbed or self.patience <= 0:
                break
            time.sleep(1)
            self.patience -= time.perf_counter() - start
        return {
            name: {"us": round(min(times), 1), "us_p50": round(statistics.median(times), 1)}
            | ({"disturbed": True} if disturbed else {})
            for name, times in rounds.items()
        }

    def _rounds(self, ways: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        repeats: dict[str, int] = {}
        for name, way in ways.items():
            durations = []
            for _ in range(5):
                start = clock()
                way()
                durations.append(clock() - start)
            repeats[name] = max(1, int(0.0005 / min(durations)))
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        end = time.perf_counter() + self.seconds * len(ways)
        while time.perf_counter() < end or min(map(len, rounds.values())) < 5:
            for name, way in ways.items():
                start = clock()
                for _ in range(repeats[name]):
                    way()
                rounds[name].append((clock() - start) / repeats[name] * MICRO)
        return rounds


def decode_rows(
    shape: str, dtype: str, lengths: list[int], layout: Layout, watch: Stopwatch
) -> Any:  # noqa: ANN401
    """Time one batch; a row for each way."""
    heads, kv_heads, head_dim = SHAPES[shape]
    problem = AttentionProblem(Phase.DECODE, dtype, heads, kv_heads, head_dim, 16, head_dim**-0.5)
    case = make_case(problem, [1] * len(lengths), lengths, layout=layout)
    ways = {
        "naive": naive_decode(case),
        "gathered": forced_decode(case, 1 << 40),
        "in_place": forced_decode(case, 0),
        "torch_decode": chosen(case),
    }
    num_bytes = 2 * sum(lengths) * kv_heads * head_dim * case.kv.element_size()
    return [
        {
            "phase": "decode",
            "shape": shape,
            "hq": heads,
            "hkv": kv_heads,
            "d": head_dim,
            "batch": len(lengths),
            "context": lengths[0] if len(set(lengths)) == 1 else "ragged",
            "layout": layout.value,
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "kernel": name,
            **times,
            "gbs": round(num_bytes / times["us"] / 1e3, 2),
        }
        for name, times in watch.measure(ways).items()
    ]


def prefill_rows(shape: str, dtype: str, queries: int, history: int, watch: Stopwatch) -> Any:  # noqa: ANN401
    """Time one chunk of one sequence; a row for each way."""
    heads, kv_heads, head_dim = SHAPES[shape]
    problem = AttentionProblem(Phase.PREFILL, dtype, heads, kv_heads, head_dim, 16, head_dim**-0.5)
    case = make_case(problem, [queries], [history + queries])
    ways = {"sdpa": sdpa_prefill(case), "torch_prefill": chosen(case)}
    pairs = queries * history + queries * (queries + 1) // 2
    return [
        {
            "phase": "prefill",
            "shape": shape,
            "hq": heads,
            "hkv": kv_heads,
            "d": head_dim,
            "batch": 1,
            "seqlen": queries,
            "history": history,
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "kernel": name,
            **times,
            "tflops": round(4 * pairs * head_dim * heads / times["us"] / MICRO, 4),
        }
        for name, times in watch.measure(ways).items()
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per problem, the best microseconds of each way side by side."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        where = row.get("layout", f"after {row.get('history')}")
        size = row.get("context", row.get("seqlen"))
        key = (
            f"{row['phase']:8}{row['shape']:11}{row['dtype']:9} threads {row['threads']} "
            f"{row['batch']} x {size!s:6} {where:11}"
        )
        mark = " (disturbed)" if row.get("disturbed") else ""
        lines.setdefault(key, []).append(f"{row['kernel']} {row['us']:.0f}{mark}")
    for key, cells in lines.items():
        print(key, "   ".join(cells))


def main() -> None:
    """Measure every shape and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.1, help="time per way and shape")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--patience", type=float, default=300, help="seconds for measuring disturbed problems again"
    )
    arguments = parser.parse_args()
    watch = Stopwatch(arguments.seconds, arguments.patience)
    rows: list[dict[str, Any]] = []
    batches = [[length] * batch for batch in (1, 8) for length in (64, 256, 1024, 2048)]
    with torch.inference_mode():
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for shape in SHAPES:
                for dtype in ("float32", "bfloat16"):
                    for lengths in [*batches, RAGGED]:
                        rows += decode_rows(shape, dtype, lengths, Layout.CONTIGUOUS, watch)
                    for layout in (Layout.TWO_RUNS, Layout.FRAGMENTED):
                        for lengths in ([1024], [1024] * 8):
                            rows += decode_rows(shape, dtype, lengths, layout, watch)
                    for queries, history in ((16, 0), (128, 0), (512, 0), (8, 512), (512, 1024)):
                        rows += prefill_rows(shape, dtype, queries, history, watch)
    write_report("attention", rows)
    print_table(rows)


if __name__ == "__main__":
    main()
