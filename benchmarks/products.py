"""Times the products of decoder layers on a GPU, by kernel and by tile sizes.

    library       cuBLAS; with a gate, its launch; for the residual stream, added in place, then the norm
    matrix        `kernels.linear.gpu.matrix`, up to 256 rows; with partial sums, which the norm adds
    persistent    `kernels.linear.gpu.persistent` with the planned tile sizes, and with those of `--tiles`

Results are compared with float32 first. Each contender's calls are recorded; they use the weights of several layers in
turn, so that weights come from memory, and the recordings of all contenders are replayed alternately.

    python -m benchmarks.products [--models qwen2.5-1.5b ...] [--kinds gated ...] [--rows 128 4096 ...]
        [--tiles 128x256 128x128,stages=5,skew=0 ...] [--deterministic] [--seconds 120] [--out results/]

`--deterministic` compares the batch-invariant products of more than 256 rows instead, whose bits must be equal.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import functools
import statistics
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.report import add_bookkeeping, write_report
from kernels.gpu.compile_ahead import compile_ahead
from kernels.linear.around import add_and_normalize
from kernels.linear.gpu.matrix import MatrixLinear
from kernels.linear.gpu.persistent import PersistentLinear
from kernels.linear.library import LibraryLinear
from kernels.linear.matrix_tiles import ROW_COUNTS
from kernels.linear.persistent_tiles import (
    INVARIANT_FEWEST_ROWS,
    PersistentLaunch,
    fits,
    plan_persistent,
    rounded_rows,
    sized,
)
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import LIBRARY
from kernels.linear.select import LinearChoice
from kernels.linear.weights import LinearArguments, LinearWeights, Norm
from kernels.norms.gpu.norm_and_gate import silu_and_mul
from kernels.norms.pytorch import sum_in_order
from kernels.weights import Weight
from model.checkpoint.config import ModelConfig
from server.cli.bench.engine.options import SHAPES, shapes
from tests.kernels.references import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

KINDS: Final = ("qkv", "output", "gated", "down")
_MODELS: Final = (
    "qwen2.5-1.5b", "llama-3.2-1b", "tinyllama-1.1b", "qwen3-0.6b", "qwen3-1.7b", "llama-3.2-3b", "llama-3.1-8b",
    "smollm2-135m",
)  # fmt: skip
_ROWS: Final = (128, 256, 512, 1024, 4096, 8192)
_TILES: Final = ("128x256", "128x256,skew=0", "128x128")
_DTYPE: Final = torch.bfloat16
_COLD_BYTES: Final = 150 << 20
"""Weights that are read before the first ones are read again: three times the second-level cache."""
_POOL_NUMBERS: Final = 1 << 29
_SCALE: Final = 0.02
_CHECKED_ROWS: Final = 512
_RECORDED_US: Final = 800.0
_MOST_CALLS: Final = 256
_REPLAYS: Final = 3
_ROUNDS: Final = 3
_TOLERANCE: Final = 2.0**-7
"""Of the largest number: half-precision outputs of two kernels may be rounded differently."""


class Case(NamedTuple):
    """A product of a layer.

    Attributes:
        model: which has it, the first if several have.
        kind: one of `KINDS`.
        problem: the layer and its rows.
    """

    model: str
    kind: str
    problem: LinearProblem

    @property
    def stacked(self) -> int:
        """Rows of the weights."""
        return self.problem.matrices * self.problem.outputs

    @property
    def flops(self) -> float:
        """Operations of the product."""
        return 2.0 * self.problem.rows * self.stacked * self.problem.inputs


class Contender(NamedTuple):
    """A way to compute a case.

    Attributes:
        name: of the kernel, with its tile sizes.
        product: computes the product with the weights of a given number, as a tensor to compare.
        call: computes it with what follows, for timing.
    """

    name: str
    product: Callable[[int], Tensor]
    call: Callable[[int], object]


def cases(models: Sequence[str], kinds: Sequence[str], rows: Sequence[int]) -> Iterator[Case]:
    """Yield the distinct products of some models' layers."""
    seen = set()
    for model in models:
        network = ModelConfig.from_folder(SHAPES / model).network
        mixer, c, inner = network.layers[0].mixer, network.hidden, network.layers[0].mlp.inner
        heads = mixer.num_heads * mixer.head_dim
        stacked = heads + 2 * mixer.num_kv_heads * mixer.head_dim
        weights = c * (stacked + heads + 3 * inner)
        layer = functools.partial(LinearProblem, 1, layer_weights=weights)
        problems = {
            "qkv": layer(stacked, c, bias=mixer.bias),
            "output": layer(c, heads, residual=True),
            "gated": layer(inner, c, gated=True),
            "down": layer(c, inner, residual=True),
        }
        for kind in kinds:
            for count in rows:
                problem = dataclasses.replace(problems[kind], rows=count)
                key = dataclasses.replace(problem, layer_weights=1)
                if key not in seen:
                    seen.add(key)
                    yield Case(model, kind, problem)


class Layers:
    """The weights of several layers for a case, its input, and its contenders."""

    def __init__(self, case: Case, pool: Tensor) -> None:
        self.case, problem = case, case.problem
        size = case.stacked * problem.inputs
        count = min(_MOST_CALLS, max(2, -(-_COLD_BYTES // (2 * size))))
        step = (len(pool) - size) // (count - 1) // 64 * 64
        bias = pool[: case.stacked] / _SCALE if problem.bias else None
        self.weights = [
            LinearWeights(
                Weight.full(pool[i * step :][:size].view(case.stacked, problem.inputs)), bias
            )
            for i in range(count)
        ]
        self._x = pool[-problem.rows * problem.inputs :].view(problem.rows, -1) / _SCALE
        self._hidden = torch.zeros(
            (problem.rows, problem.outputs), dtype=_DTYPE, device=pool.device
        )
        self._norm = Norm(torch.ones(problem.outputs, dtype=_DTYPE, device=pool.device), 1e-6)

    def expected(self, picked: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the results of some rows with the first weights, computed in a dtype."""
        weight, bias = self.weights[0]
        y = self._x[picked].to(dtype) @ weight.dequantize(dtype).T
        if bias is not None:
            y += bias.to(dtype)
        return reference.silu_and_mul(y, dtype) if self.case.problem.gated else y

    def library(self) -> Contender:
        """Return cuBLAS with what surrounds its products."""
        problem = self.case.problem
        choice = LinearChoice(problem, LIBRARY, None, "")
        layers = [LibraryLinear(it, problem) for it in self.weights]

        def product(i: int) -> Tensor:
            y = layers[i](self._x, choice, None, LinearArguments(pdl=True))
            return silu_and_mul(y, pdl=True) if problem.gated else y

        def to_residual(i: int) -> Tensor:
            arguments = LinearArguments(residual=self._hidden, pdl=True)
            layers[i](self._x, choice, self._hidden, arguments)
            return add_and_normalize(self._norm, self._hidden, None, pdl=True)

        return Contender("library", product, to_residual if problem.residual else product)

    def matrix(self) -> Contender:
        """Return the kernel for up to 256 rows."""
        layers = [MatrixLinear(it, self.case.problem) for it in self.weights]

        def run(i: int) -> Tensor:
            return layers[i](self._x, _unused(self.case.problem), None, LinearArguments(pdl=True))

        return self._contender("matrix", run)

    def persistent(self, launch: PersistentLaunch | None) -> Contender:
        """Return the persistent kernel with given tile sizes; None for those that are planned."""
        problem = self.case.problem
        layers = [PersistentLinear(it, problem) for it in self.weights]
        used = launch or plan_persistent(problem, rounded_rows(problem.rows))

        def run(i: int) -> Tensor:
            return layers[i].run(self._x, used, pdl=True)

        return self._contender(describe(used), run)

    def _contender(self, name: str, run: Callable[[int], Tensor]) -> Contender:
        if not self.case.problem.residual:
            return Contender(name, run, run)

        def to_residual(i: int) -> Tensor:
            return add_and_normalize(self._norm, self._hidden, run(i), pdl=True)

        return Contender(name, lambda i: sum_in_order(run(i)), to_residual)


def _unused(problem: LinearProblem) -> LinearChoice:
    return LinearChoice(problem, LIBRARY, None, "")


def describe(launch: PersistentLaunch) -> str:
    """Name tile sizes as `parse_tiles` reads them."""
    splits = f",splits={launch.splits}" if launch.splits > 1 else ""
    rest = f"stages={launch.stages},skew={launch.skew},group={launch.group}"
    return f"{launch.rows}x{launch.outputs},{rest}{splits}"


def parse_tiles(text: str) -> dict[str, Any]:
    """Read "rows x outputs" and further fields of a `PersistentLaunch`, such as "128x256,stages=3,skew=0"."""
    tile, *fields = text.split(",")
    rows, outputs = map(int, tile.split("x"))
    return {"rows": rows, "outputs": outputs} | {
        name: int(value) for name, _, value in (it.partition("=") for it in fields)
    }


def tried(case: Case, tiles: Sequence[str]) -> list[PersistentLaunch]:
    """List the planned tile sizes, then those of `tiles` that fit the case, each once."""
    problem = case.problem
    found = [plan_persistent(problem, rounded_rows(problem.rows))]
    for fields in map(parse_tiles, tiles):
        launch = sized(PersistentLaunch(**fields), problem)
        if fits(launch, problem):
            found.append(launch)
    return list(dict.fromkeys(found))


def contenders(layers: Layers, tiles: Sequence[str], *, deterministic: bool) -> list[Contender]:
    """List the contenders for a case, the library first."""
    if deterministic:
        return [layers.library(), layers.matrix(), layers.persistent(None)]
    found = [layers.library()]
    if layers.case.problem.rows <= ROW_COUNTS[-1]:
        found.append(layers.matrix())
    return found + [layers.persistent(it) for it in tried(layers.case, tiles)]


def compare(layers: Layers, found: list[Contender], *, deterministic: bool) -> dict[str, float]:
    """Return each contender's largest error against float32, divided by the largest number.

    Raises:
        AssertionError: the error is more than twice the library's and more than its rounding, a row that is not
            compared with float32 differs from the library's, or two batch-invariant products have different bits.
    """
    rows = layers.case.problem.rows
    picked = torch.arange(rows, device="cuda")
    if rows > _CHECKED_ROWS:
        picked = torch.cat([picked[: _CHECKED_ROWS // 2], picked[-_CHECKED_ROWS // 2 :]])
    truth = layers.expected(picked, torch.float32)
    largest = float(truth.abs().max())
    errors: dict[str, float] = {}
    outputs: list[Tensor] = []
    for it in found:
        y = it.product(0)
        errors[it.name] = float((y[picked].float() - truth).abs().max()) / largest
        outputs = [*outputs, y] if not outputs or deterministic else outputs
        allowed = 2 * errors["library"] + _TOLERANCE / 4
        apart = float((y.float() - outputs[0].float()).abs().max()) / largest
        # A comparison with NaN is false.
        if not (errors[it.name] <= allowed and apart <= 4 * _TOLERANCE):
            raise AssertionError(
                f"{it.name} for {layers.case.problem}: error {errors[it.name]:.4f}, the library's "
                f"{errors['library']:.4f}, a difference of {apart:.4f} from it"
            )
    if deterministic and not torch.equal(*outputs[1:]):
        raise AssertionError(f"matrix and persistent have different bits for {layers.case.problem}")
    return errors


def time_all(layers: Layers, found: list[Contender]) -> dict[str, float]:
    """Return the microseconds of a call of each contender: the median of rounds."""
    case, count = layers.case, len(layers.weights)
    guess = max(case.flops / 5e8, case.problem.weight_bytes / 2e6)
    calls = min(
        _MOST_CALLS, max(2, count if guess < _RECORDED_US else 2, round(_RECORDED_US / guess))
    )
    graphs = {}
    for it in found:
        it.call(0)  # loads its kernels, which a recording may not do
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                it.call(i % count)
        graphs[it.name] = graph
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(_ROUNDS + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            graph.replay()
            start.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            if number:  # not the first, which loads the recording
                times[name].append(start.elapsed_time(end) * 1e3 / _REPLAYS / calls)
    return {name: statistics.median(each) for name, each in times.items()}


def measure(case: Case, pool: Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare and time a case; print a line and return a record for each contender."""
    layers = Layers(case, pool)
    found = contenders(layers, options.tiles, deterministic=options.deterministic)
    planned = found[-1 if options.deterministic else 1 + (found[1].name == "matrix")].name
    errors = compare(layers, found, deterministic=options.deterministic)
    times = time_all(layers, found)
    library, ours = times["library"], {k: v for k, v in times.items() if k != "library"}
    best = min((name for name in ours if name != "matrix"), key=ours.__getitem__)
    problem = case.problem

    def shown(name: str) -> str:
        us = times.get(name)
        return f"{us:8.1f} {case.flops / us / 1e6:4.0f}" if us else " " * 13

    print(
        f"{case.model:14} {case.kind:6} {case.stacked:6}x{problem.inputs:<6}{problem.rows:5} | {shown('library')} | "
        f"{shown('matrix')} | {shown(planned)} {planned} | {shown(best)} {'' if best == planned else best} | "
        f"{library / times[best]:.3f}",
        flush=True,
    )
    return [
        {
            "model": case.model, "kind": case.kind, "outputs": case.stacked, "inputs": problem.inputs,
            "rows": problem.rows, "deterministic": options.deterministic, "contender": name,
            "planned": name == planned, "us": round(us, 2), "tflops": round(case.flops / us / 1e6, 1),
            "error": errors[name],
        }
        for name, us in times.items()
    ]  # fmt: skip


def _compile(found: list[Case], pool: Tensor, options: argparse.Namespace) -> None:
    """Compile all kernels in parallel."""
    with compile_ahead():
        for case in found:
            layers = Layers(case, pool)
            for it in contenders(layers, options.tiles, deterministic=options.deterministic):
                it.call(0)


def main() -> None:
    """Compare, then time every case, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=shapes(), default=list(_MODELS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rows", type=int, nargs="+", default=list(_ROWS))
    parser.add_argument(
        "--tiles", nargs="*", default=list(_TILES), metavar="ROWSxOUTPUTS,FIELD=NUMBER"
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="batch-invariant products of more than 256 rows",
    )
    parser.add_argument(
        "--seconds", type=float, help="end the program after this time, in case a kernel hangs"
    )
    add_bookkeeping(parser)
    options = parser.parse_args()
    if options.seconds is not None:
        faulthandler.dump_traceback_later(options.seconds, exit=True)
    found = list(cases(options.models, options.kinds, options.rows))
    if options.deterministic:
        found = [
            it._replace(problem=dataclasses.replace(it.problem, batch_invariant=True))
            for it in found
            if it.problem.rows >= INVARIANT_FEWEST_ROWS
        ]
    generator = torch.Generator("cuda").manual_seed(0)
    pool = torch.empty(_POOL_NUMBERS, dtype=_DTYPE, device="cuda")
    pool.normal_(0, _SCALE, generator=generator)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        _compile(found, pool, options)
        print(
            f"{'microseconds and TFLOP/s':40} | library | matrix | persistent, planned | best | gain"
        )
        for case in found:
            rows += measure(case, pool, options)
    write_report(
        "products", rows, ("torch", "triton"), device="cuda", folder=options.out, revision=options.commit, echo=False
    )  # fmt: skip


if __name__ == "__main__":
    main()
