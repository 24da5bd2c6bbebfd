"""Times recurrent mixers between their products, by kernel: decode rows of one token each, and one prompt.

Results are compared with those of PyTorch's operations first, where there are few tokens. On a GPU each kernel's calls
are recorded; they use the states of several layers in turn, so that states come from memory. The bound is the time that
the bytes of inputs, results and states take at the memory's peak, or the products of blocks of 64 tokens at that of the
tensor cores, whichever is longer; nothing says what it is on a CPU.

    python -m benchmarks.recurrent [--device cuda] [--models qwen3.5-0.8b ...] [--rows 1 64 ...] [--prompts 1024 ...]
        [--dtype bfloat16] [--kernels triton_recurrent ...] [--seconds 120] [--out results/]
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import statistics
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.report import add_bookkeeping, write_report
from kernels.arch import GPUArch, detect
from kernels.gpu.compile_ahead import compile_ahead
from kernels.recurrent.problem import (
    CHUNK,
    GatedDeltaShape,
    Mamba2Shape,
    RecurrentProblem,
    RecurrentShape,
    RecurrentWeights,
    ShortConvShape,
)
from kernels.recurrent.registry import PYTORCH, REGISTRY, RecurrentSpec, select
from kernels.recurrent.segments import Segments
from kernels.selection import load
from model.checkpoint.config import ModelConfig
from model.executors.layers.recurrent import recurrent_shape
from model.network.mixers import GatedDelta, Mamba2, Parallel, ShortConv
from server.cli.bench.engine.options import SHAPES, shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kernels.recurrent.segments import RecurrentKernel

MODELS: Final = (
    "qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b", "lfm2-1.2b", "granite-4.0-h-micro", "falcon-h1-1.5b",
)  # fmt: skip
_ROWS: Final = {"cuda": (1, 4, 16, 64, 256), "cpu": (1, 8)}
_PROMPTS: Final = {"cuda": (1024, 4096, 16384, 65536), "cpu": (128, 1024)}
_COLD_BYTES: Final = 150 << 20
"""States that are used before the first ones are used again: three times the second-level cache."""
_MOST_LAYERS: Final = 64
_COMPARED_TOKENS: Final = 2048
_TOLERANCE: Final = 2.0**-6
"""Of the largest number: a kernel in half precision rounds the factors of its products."""
_RECORDED_US: Final = 800.0
_MOST_CALLS: Final = 256
_REPLAYS: Final = 3
_ROUNDS: Final = 5
_CPU_SECONDS: Final = 0.2
"""Least time of a round on a CPU."""


class Case(NamedTuple):
    """A mixer of a model and the tokens of a step.

    Attributes:
        model: which has it, the first if several have.
        shape: of the mixer.
        kind: "decode", rows of one token each, or "prompt", one of them.
        tokens: their number.
    """

    model: str
    shape: RecurrentShape
    kind: str
    tokens: int


class Work(NamedTuple):
    """What a case must do at least.

    Attributes:
        num_bytes: moved from and to memory.
        flops: of products that tensor cores compute.
    """

    num_bytes: int
    flops: int

    def bound_us(self, arch: GPUArch) -> tuple[float, str] | None:
        """Return the least microseconds on a processor and what takes them; None if its peaks are not known."""
        if not arch.memory_bandwidth_gbs or not arch.half_tflops:
            return None
        times = {
            "memory": self.num_bytes / arch.memory_bandwidth_gbs / 1e3,
            "flops": self.flops / arch.half_tflops / 1e6,
        }
        longest = max(times, key=times.__getitem__)
        return times[longest], longest


def mixers(model: str) -> list[RecurrentShape]:
    """Return the distinct recurrent mixers of a model."""
    found = []
    for layer in ModelConfig.from_folder(SHAPES / model).network.layers:
        parts = layer.mixer.mixers if isinstance(layer.mixer, Parallel) else (layer.mixer,)
        found += [
            recurrent_shape(it) for it in parts if isinstance(it, ShortConv | GatedDelta | Mamba2)
        ]
    return list(dict.fromkeys(found))


def cases(models: Sequence[str], rows: Sequence[int], prompts: Sequence[int]) -> Iterator[Case]:
    """Yield the distinct mixers of some models, with each number of rows and each length of a prompt."""
    seen = set()
    for model in models:
        for shape in mixers(model):
            if shape not in seen:
                seen.add(shape)
                yield from (Case(model, shape, "decode", count) for count in rows)
                yield from (Case(model, shape, "prompt", length) for length in prompts)


def inputs(shape: RecurrentShape) -> tuple[int, int]:
    """Return the elements of a token in `projected` and in `gates`."""
    if isinstance(shape, ShortConvShape):
        return 3 * shape.channels, 0
    if isinstance(shape, GatedDeltaShape):
        return shape.channels + shape.inner, 2 * shape.num_heads
    return shape.inner + shape.channels + shape.num_heads, 0


def outputs(shape: RecurrentShape) -> int:
    """Return the elements of the result of a token."""
    return shape.channels if isinstance(shape, ShortConvShape) else shape.inner


def states(shape: RecurrentShape) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the states of a sequence."""
    conv = shape.width - 1, shape.channels
    if isinstance(shape, GatedDeltaShape):
        return conv, (shape.num_heads, shape.key_dim, shape.value_dim)
    if isinstance(shape, Mamba2Shape):
        return conv, (shape.num_heads, shape.head_dim, shape.state_dim)
    return (conv,)


def work(case: Case, itemsize: int) -> Work:
    """Return what a case must do at least.

    Args:
        case: the tokens.
        itemsize: bytes of an element of inputs and results.
    """
    shape, is_prompt = case.shape, case.kind == "prompt"
    token = (sum(inputs(shape)) + outputs(shape)) * itemsize
    sequence = 4 * sum(map(math.prod, states(shape)))
    # A new prompt reads no state.
    moved = case.tokens * token + (sequence if is_prompt else 2 * case.tokens * sequence)
    return Work(moved, case.tokens * token_flops(shape) if is_prompt else 0)


def token_flops(shape: RecurrentShape) -> int:
    """Return the operations of the products of a token, in blocks of `CHUNK`, without those of single elements."""
    if isinstance(shape, GatedDeltaShape):
        keys, values = shape.key_dim, shape.value_dim
        # Keys and queries by keys; the state by keys, by queries and its growth; new values from the triangular system,
        # half of whose factors are zeros, and results from them.
        a_head = 3 * 2 * keys * values + CHUNK * values + 2 * CHUNK * values
        return shape.num_key_heads * 2 * 2 * CHUNK * keys + shape.num_heads * a_head
    if isinstance(shape, Mamba2Shape):
        size = shape.state_dim
        # The state by c and its growth, and what is within the block.
        a_head = 2 * 2 * size * shape.head_dim + 2 * CHUNK * shape.head_dim
        return shape.num_groups * 2 * CHUNK * size + shape.num_heads * a_head
    return 0


class Mixers:
    """The states of several layers for a case, its inputs and its weights, which the layers share.

    Args:
        case: the tokens.
        dtype: of inputs and weights.
        device: "cpu" or "cuda".
    """

    def __init__(self, case: Case, dtype: torch.dtype, device: str) -> None:
        self.case, shape, tokens = case, case.shape, case.tokens
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(size, generator=generator, device=device) * scale

        projected, gates = inputs(shape)
        self.projected = normal(tokens, projected).to(dtype)
        self.gates = normal(tokens, gates).to(dtype) if gates else None
        self.weights = _weights(shape, normal, dtype)
        is_prompt = case.kind == "prompt"
        self._slots = 1 if is_prompt else tokens
        a_layer = 4 * self._slots * sum(map(math.prod, states(shape)))
        self.num_layers = (
            min(_MOST_LAYERS, max(2, -(-_COLD_BYTES // a_layer))) if device == "cuda" else 2
        )
        self.layers = [self.new_states(normal) for _ in range(self.num_layers)]
        slots = torch.arange(self._slots, dtype=torch.int32, device=device)
        read = torch.full_like(slots, -1) if is_prompt else slots
        self.segments = Segments(
            0 if is_prompt else tokens,
            torch.tensor([0, tokens] if is_prompt else [0], dtype=torch.int32, device=device),
            torch.arange(tokens, device=device),
            torch.stack([read, slots], 1),
        )

    def new_states(self, normal: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        """Return states of every slot."""
        return tuple(normal(self._slots, *it, scale=0.1) for it in states(self.case.shape))

    def run(self, kernel: RecurrentKernel, layer: int, projected: Tensor | None = None) -> Tensor:
        """Compute the case with the states of a layer; `projected` may be overwritten."""
        given = self.projected if projected is None else projected
        return kernel(given, self.gates, self.layers[layer], self.segments)


def _weights(
    shape: RecurrentShape, normal: Callable[..., Tensor], dtype: torch.dtype
) -> RecurrentWeights:
    """Return weights with the decays of new models."""
    conv = normal(shape.channels, shape.width, scale=0.5).to(dtype)
    if isinstance(shape, ShortConvShape):
        return RecurrentWeights(conv, normal(shape.channels).to(dtype) if shape.bias else None)
    heads = normal(shape.num_heads)
    common = {"a_log": heads.abs(), "dt_bias": heads - 4.0}
    if isinstance(shape, GatedDeltaShape):
        return RecurrentWeights(conv, norm=normal(shape.value_dim).to(dtype), **common)
    return RecurrentWeights(
        conv,
        normal(shape.channels).to(dtype) if shape.conv_bias else None,
        d=normal(shape.num_heads),
        norm=None if shape.eps is None else normal(shape.inner).to(dtype),
        **common,
    )


def contenders(
    problem: RecurrentProblem, arch: GPUArch, names: Sequence[str] | None
) -> list[RecurrentSpec]:
    """Return the row that serves a problem, or the rows of some names that can compute it; say why others cannot."""
    if names is None:
        return [select(problem, arch).spec]
    found = []
    for row in REGISTRY:
        # A row for other mixers is no contender.
        if row.name in names and type(problem.shape) in row.targets:
            if reasons := row.unsupported(problem, arch):
                print(f"{row.name} cannot compute {problem}: {'; '.join(reasons)}")
            else:
                found.append(row)
    return found


def make(row: RecurrentSpec, it: Mixers) -> RecurrentKernel:
    """Return the kernel of a row with the weights of a case."""
    shape = it.case.shape
    kernel: RecurrentKernel = load(row.targets[type(shape)])(shape, it.weights)
    return kernel


def compare(it: Mixers, rows: Sequence[RecurrentSpec]) -> dict[str, float | None]:
    """Return each row's largest difference from PyTorch's operations, divided by the largest number.

    Raises:
        AssertionError: a difference is larger than roundings explain.
    """
    if it.case.tokens > _COMPARED_TOKENS:
        return {row.name: None for row in rows}
    before = tuple(state.clone() for state in it.layers[0])
    expected = it.run(make(PYTORCH, it), 0, it.projected.clone()).float()
    found: dict[str, float | None] = {}
    for row in rows:
        for state, old in zip(it.layers[0], before, strict=True):
            state.copy_(old)
        y = it.run(make(row, it), 0, it.projected.clone()).float()
        apart = float((y - expected).abs().max() / expected.abs().max())
        if not apart <= _TOLERANCE:  # not for NaN either
            raise AssertionError(f"{row.name} differs by {apart:.4f} for {it.case}")
        found[row.name] = apart
    return found


def time_on_gpu(it: Mixers, row: RecurrentSpec, guess_us: float) -> float:
    """Return the microseconds of a call: the median of rounds of a recording."""
    kernel = make(row, it)
    calls = min(_MOST_CALLS, max(it.num_layers if guess_us < _RECORDED_US else 2, 2))
    if guess_us > 0:
        calls = min(_MOST_CALLS, max(calls, round(_RECORDED_US / guess_us)))
    it.run(kernel, 0)  # loads its kernels, which a recording may not do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            it.run(kernel, i % it.num_layers)
    times: list[float] = []
    for number in range(_ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        graph.replay()
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        if number:  # not the first, which loads the recording
            times.append(start.elapsed_time(end) * 1e3 / _REPLAYS / calls)
    return statistics.median(times)


def time_on_cpu(it: Mixers, row: RecurrentSpec, seconds: float) -> float:
    """Return the microseconds of a call: the median of rounds."""
    kernel = make(row, it)
    it.run(kernel, 0)
    times = []
    for _ in range(_ROUNDS):
        calls, start = 0, time.perf_counter()
        while not calls or time.perf_counter() - start < seconds:
            it.run(kernel, calls % it.num_layers)
            calls += 1
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return statistics.median(times)


def measure(case: Case, arch: GPUArch, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare and time a case; print a line and return a record for each kernel."""
    dtype = getattr(torch, options.dtype)
    it = Mixers(case, dtype, options.device)
    rows = contenders(RecurrentProblem(case.shape, options.dtype), arch, options.kernels)
    differences = compare(it, rows)
    least = work(case, dtype.itemsize)
    bound = least.bound_us(arch)
    found = []
    for row in rows:
        us = (
            time_on_gpu(it, row, bound[0] if bound else 0.0)
            if options.device == "cuda"
            else time_on_cpu(it, row, options.round_seconds)
        )
        record: dict[str, Any] = {
            "model": case.model, "mixer": type(case.shape).__name__.removesuffix("Shape"), "kind": case.kind,
            "tokens": case.tokens, "dtype": options.dtype, "kernel": row.name, "us": round(us, 2),
            "gb_per_s": round(least.num_bytes / us / 1e3, 1), "tflops": round(least.flops / us / 1e6, 3),
            "difference": differences[row.name],
        }  # fmt: skip
        if bound:
            record |= {
                "bound": bound[1],
                "bound_us": round(bound[0], 2),
                "share": round(bound[0] / us, 3),
            }
        share = f"{record['share']:.0%} of {record['bound']}" if bound else ""
        print(
            f"{case.model:20} {record['mixer']:10} {case.kind:6} {case.tokens:6} | {row.name:18} {us:10.1f} us "
            f"{record['gb_per_s']:8.1f} GB/s {record['tflops']:7.2f} TFLOP/s {share}",
            flush=True,
        )
        found.append(record)
    return found


def _compile(found: Sequence[Case], arch: GPUArch, options: argparse.Namespace) -> None:
    """Compile all kernels in parallel; those of other lengths are the same."""
    with compile_ahead():
        for case in {(it.shape, it.kind): it for it in reversed(found)}.values():
            it = Mixers(case, getattr(torch, options.dtype), options.device)
            problem = RecurrentProblem(case.shape, options.dtype)
            for row in contenders(problem, arch, options.kernels):
                if row is not PYTORCH:
                    it.run(make(row, it), 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, then time every case, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--models", nargs="+", choices=shapes(), default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of decode rows")
    parser.add_argument("--prompts", type=int, nargs="*", help="lengths of prompts, in tokens")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: float32 on a CPU"
    )
    parser.add_argument(
        "--kernels",
        nargs="+",
        choices=[row.name for row in REGISTRY],
        help="rows of the registry; default: the one that serves",
    )
    parser.add_argument(
        "--round-seconds", type=float, default=_CPU_SECONDS, help="least time of a round on a CPU"
    )
    parser.add_argument(
        "--seconds", type=float, help="end the program after this time, in case a kernel hangs"
    )
    add_bookkeeping(parser)
    options = parser.parse_args(arguments)
    if options.seconds is not None:
        faulthandler.dump_traceback_later(options.seconds, exit=True)
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    rows = _ROWS[options.device] if options.rows is None else options.rows
    prompts = _PROMPTS[options.device] if options.prompts is None else options.prompts
    found, arch = list(cases(options.models, rows, prompts)), detect(options.device)
    records: list[dict[str, Any]] = []
    with torch.inference_mode():
        if options.device == "cuda":
            _compile(found, arch, options)
        for case in found:
            records += measure(case, arch, options)
    write_report(
        "recurrent", records, ("torch", "triton") if options.device == "cuda" else ("torch",), device=options.device,
        folder=options.out, revision=options.commit, echo=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
