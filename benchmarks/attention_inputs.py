"""Full-size inputs for timing attention, checks of the output, and the timing of a call.

Tensors are created on the device, where filling gigabytes takes milliseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.launch import LaunchConfig, TunedLaunch
from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.attention.registry import INVARIANT_REGISTRY, REGISTRY
from kernels.attention.select import Selection
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than, truth_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.attention_shapes import Shape
    from kernels.arch import GPUArch
    from kernels.attention.plan import AttentionPlan
    from kernels.attention.spec import KernelSpec

BLOCK_SIZE = 16
_CHECKED_ROWS = 64
_MICRO = 1e6
_MILLI_TO_MICRO = 1e3
_CLEARED_BYTES = 1 << 30
_CLEARING_MS = 0.4
_FEWEST_CALLS = 5


class Timing(NamedTuple):
    """Microseconds of one call: the median, the 20th and the 80th percentile."""

    median: float
    low: float
    high: float

    def record(self) -> dict[str, Any]:
        """Return the entries of a result's row."""
        return {
            "us": round(self.median, 2),
            "us_p20_p80": [round(self.low, 2), round(self.high, 2)],
        }


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of one shape.

    Attributes:
        shape: the shape.
        problem: attention problem for the public API.
        batch: batch for the public API.
        q: [T, H, D].
        kv: [2, N, S, K, D] paged, [2, T, K, D] packed.
        out: [T, H, D].
    """

    shape: Shape
    problem: AttentionProblem
    batch: PagedBatch | PackedBatch
    q: Tensor
    kv: Tensor
    out: Tensor

    def plan(self, selection: Selection) -> AttentionPlan:
        """Plan the attention with a given selection."""
        return kernels.plan_attention(self.problem, self.batch, selection=selection)

    def run(self, plan: AttentionPlan) -> None:
        """Compute the attention into `out`, through the public API."""
        if self.problem.phase is Phase.DECODE:
            kernels.decode_attention(self.q, self.kv, plan, self.out)
        else:
            kernels.prefill_attention(self.q, self.kv, plan, self.out)

    def keys_and_values(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Gather one sequence's keys and values, each [n, K, D]."""
        length = self.shape.seq_lens[sequence]
        if isinstance(self.batch, PackedBatch):
            start = sum(self.shape.seq_lens[:sequence])
            rows = slice(start, start + length)
            return self.kv[0, rows], self.kv[1, rows]
        blocks = self.batch.block_table[sequence, : -(-length // BLOCK_SIZE)].long()
        return self.kv[0][blocks].flatten(0, 1)[:length], self.kv[1][blocks].flatten(0, 1)[:length]

    def check(self, out: Tensor) -> tuple[float, float]:
        """Compare some rows of some sequences with the reference, and check that every value is finite.

        Args:
            out: [T, H, D], NaN where nothing was written.

        Returns:
            The largest error of `out` and the largest error of plain PyTorch in the same precision, both against the
            reference in higher precision.

        Raises:
            AssertionError: the error of `out` exceeds the tolerance rule, or a value is not finite.
        """
        if not bool(torch.isfinite(out).all()):
            raise AssertionError(f"{int((~torch.isfinite(out)).sum())} values are not finite")
        ours: list[Tensor] = []
        truth: list[Tensor] = []
        plain: list[Tensor] = []
        rules: dict[str, Any] = {
            "softmax_scale": self.problem.softmax_scale,
            "causal": self.problem.causal,
            "sliding_window": self.problem.sliding_window,
        }
        for sequence in self._checked_sequences():
            keys, values = self.keys_and_values(sequence)
            queries = self.shape.query_lens[sequence]
            first = sum(self.shape.query_lens[:sequence])
            for start, stop in _checked_rows(queries):
                rows = slice(first + start, first + stop)
                seen = keys.shape[0] - queries + stop if self.problem.causal else keys.shape[0]
                ours.append(out[rows])
                for dtype, results in ((truth_dtype(out.dtype), truth), (out.dtype, plain)):
                    result = reference.attention(
                        self.q[rows], keys[:seen], values[:seen], **rules, dtype=dtype
                    )
                    results.append(result)
        got, exact, same = torch.cat(ours), torch.cat(truth), torch.cat(plain)
        assert_no_worse_than(got, exact, same)
        return float((got - exact).abs().max()), float((same - exact).abs().max())

    def _checked_sequences(self) -> list[int]:
        """Return the indices of the first, middle, last, longest and shortest sequence."""
        lengths = self.shape.seq_lens
        ends = {lengths.index(max(lengths)), lengths.index(min(lengths))}
        return sorted({0, len(lengths) // 2, len(lengths) - 1} | ends)


def _checked_rows(total: int) -> list[tuple[int, int]]:
    """Return ranges of query tokens at the beginning, in the middle and at the end of a sequence."""
    starts = {0, total // 2, max(0, total - _CHECKED_ROWS)}
    return [(start, min(total, start + _CHECKED_ROWS)) for start in sorted(starts)]


def make_inputs(
    shape: Shape, dtype: str, device: torch.device, *, paged: bool = True, seed: int = 0
) -> Inputs:
    """Make random inputs. A paged cache has blocks of 16 tokens in random order.

    Args:
        shape: sizes of the tensors.
        dtype: dtype of queries, cache and output.
        device: device of all tensors.
        paged: whether keys and values are in a paged cache; packed otherwise.
        seed: seed of the values and of the block order.
    """
    assert paged or shape.phase == "prefill", "a decode reads a paged cache"
    generator = torch.Generator(device).manual_seed(seed)
    kind: torch.dtype = getattr(torch, dtype)
    offsets_q, offsets_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        for lengths in (shape.query_lens, shape.seq_lens)
    )
    bounds: dict[str, Any] = {
        "num_tokens": sum(shape.query_lens),
        "max_seqlen_q": max(shape.query_lens),
        "max_seqlen_k": shape.length,
    }
    batch: PagedBatch | PackedBatch
    if paged:
        shared = shape.shared // BLOCK_SIZE
        counts = [shared, *(-(-length // BLOCK_SIZE) - shared for length in shape.seq_lens)]
        blocks = torch.randperm(sum(counts), generator=generator, device=device).to(torch.int32)
        prefix, *own = torch.split(blocks, counts)
        rows = [torch.cat((prefix, mine)) for mine in own]
        table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor(shape.seq_lens, dtype=torch.int32, device=device)
        batch = PagedBatch(offsets_q, lengths, table, **bounds, shared_prefix=shape.shared)
        slots: tuple[int, ...] = (sum(counts), BLOCK_SIZE)
    else:
        batch = PackedBatch(offsets_q, offsets_k, **bounds)
        slots = (sum(shape.seq_lens),)
    kv = torch.empty((2, *slots, shape.hkv, shape.d), dtype=kind, device=device)
    kv.normal_(generator=generator)
    q = torch.empty((sum(shape.query_lens), shape.hq, shape.d), dtype=kind, device=device)
    q.normal_(generator=generator)
    problem = problem_of(shape, dtype, paged=paged)
    return Inputs(shape, problem, batch, q, kv, torch.full_like(q, float("nan")))


def problem_of(shape: Shape, dtype: str, *, paged: bool = True) -> AttentionProblem:
    """Return the attention problem of a shape."""
    return AttentionProblem(
        phase=Phase(shape.phase),
        dtype=dtype,
        num_heads=shape.hq,
        num_kv_heads=shape.hkv,
        head_dim=shape.d,
        block_size=BLOCK_SIZE if paged else None,
        softmax_scale=shape.d**-0.5,
        sliding_window=shape.window,
        causal=shape.causal,
    )


def arch_of(device: torch.device) -> GPUArch:
    """Return the architecture of a device; for a CPU, in a dry run, that of an H100."""
    return kernels.detect(device) if device.type == "cuda" else CATALOGUE["h100"]


def spec_named(name: str) -> KernelSpec:
    """Return the registry row with a given name."""
    return next(spec for spec in (*REGISTRY, *INVARIANT_REGISTRY) if spec.name == name)


def forced(spec: KernelSpec, arch: GPUArch, launch: LaunchConfig) -> Selection:
    """Return a selection of one registry row, with the same launch configuration for every length."""
    row = TunedLaunch(launch, None, "given by the benchmark", measured=False)
    return Selection(spec, arch, (row,), f"{spec.name} with a given launch", ())


def parse_launch(text: str, base: LaunchConfig) -> LaunchConfig:
    """Parse `block_m=128,num_warps=8`; other fields keep the value of `base`.

    Raises:
        ValueError: a name is not a field of `LaunchConfig`.
    """
    changes = dict(item.split("=", 1) for item in text.split(",") if item)
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"{', '.join(unknown)}: not a field of a launch; they are {sorted(known)}")
    values: dict[str, Any] = {
        # A flag is 0 or 1.
        name: type(getattr(base, name))(int(value))
        for name, value in changes.items()
    }
    return dataclasses.replace(base, **values)


def show_launch(launch: LaunchConfig) -> str:
    """Format a launch as in `128x64 w8 s3 p2`: rows x keys of a tile, warps, stages, programs per SM."""
    text = f"{launch.block_m}x{launch.block_n} w{launch.num_warps} s{launch.num_stages}"
    text += f" p{launch.programs_per_sm}" if launch.programs_per_sm > 1 else ""
    return f"{text} one loop" if launch.one_loop else text


def time_call(
    call: Callable[[], object], device: torch.device, *, warmup_ms: int = 25, rep_ms: int = 100
) -> Timing:
    """Time one call with cold caches: with device events on a GPU, a single time with the host's clock elsewhere.

    Between two calls the device clears more memory than its caches hold. This takes longer than the host needs to
    launch the next call, so that only the device's work is timed.

    Args:
        call: launches the work.
        device: device that the work runs on.
        warmup_ms: approximate milliseconds of calls before the measurement.
        rep_ms: approximate milliseconds of measured calls.
    """
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return Timing(*[(time.perf_counter() - begin) * _MICRO] * 3)
    cleared = torch.empty(_CLEARED_BYTES, dtype=torch.uint8, device=device)
    call()
    turn_ms = max(_timed(call, cleared, _FEWEST_CALLS)) + _CLEARING_MS
    _timed(call, cleared, max(1, int(warmup_ms / turn_ms)))
    times = torch.tensor(_timed(call, cleared, max(_FEWEST_CALLS, int(rep_ms / turn_ms))))
    median, low, high = (_MILLI_TO_MICRO * times.quantile(torch.tensor([0.5, 0.2, 0.8]))).tolist()
    return Timing(median, low, high)


def peak_mib(call: Callable[[], object], device: torch.device) -> float | None:
    """Return the most memory that a call allocates, its result included, in MiB; None without a GPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    torch.cuda.synchronize(device)
    del kept
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)


def _timed(call: Callable[[], object], cleared: torch.Tensor, count: int) -> list[float]:
    """Return the milliseconds of each of `count` calls."""
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        for _ in range(count)
    ]
    for begin, end in events:
        cleared.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(cleared.device)
    return [begin.elapsed_time(end) for begin, end in events]
