"""Compares Tessera on a CPU with llama.cpp and `transformers`, alternately on the same cores.

Builds llama.cpp, writes its model files, lets the contenders run in turn, each alone on the machine, and reports the
medians of the rounds with the ratios between the contenders.

    python -m benchmarks.cpu_peers [--models bundled] [--quantization int8 int4] [--rounds 5] [--isa avx2]
    python -m benchmarks.cpu_peers --files gguf [--models smollm2 qwen3-0.6b] [--formats Q8_0 Q4_0 Q4_1 Q4_K_M]

With `--files gguf` Tessera serves the very file that llama.cpp reads, instead of a checkpoint that it rounds itself.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.cpu_peers import table
from benchmarks.cpu_peers.build import CACHE, INSTRUCTION_SETS, VERSION, build
from benchmarks.cpu_peers.contenders import CONTENDERS, Round
from benchmarks.cpu_peers.model_files import model_files
from benchmarks.cpu_peers.other_load import LIMIT, other_load
from benchmarks.cpu_peers.work import FILE_FORMATS, FORMATS, OTHER_FILE_FORMATS, QUANTIZED, Work
from benchmarks.report import add_bookkeeping, write_report
from model.hub.installed_models import INSTALLED
from model.hub.resolve import BUNDLED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.cpu_peers.build import LlamaBuild
    from benchmarks.cpu_peers.contenders import Measured

MODELS = (BUNDLED, "smollm2-135m", "qwen3-0.6b", "llama-3.2-1b")
FILE_MODELS = (*INSTALLED, "qwen3-0.6b")
_QUANTIZATIONS: Final = ("int8", "int4")
_LLAMA = ("llama-bench", "llama-server")


class Part(NamedTuple):
    """One contender with one kind of weights; its rounds alternate with those of a model's other parts."""

    contender: str
    weights: str


def parts(
    model: str, contenders: Sequence[str], quantizations: Sequence[str], formats: Sequence[str]
) -> list[Part]:
    """Return what runs in one round of a model; `transformers` only for the bundled one."""
    weights = {name: formats if name in _LLAMA else quantizations for name in contenders}
    if "transformers" in weights:
        weights["transformers"] = ["float32"] if model == BUNDLED else []
    return [Part(name, kind) for name in contenders for kind in weights[name]]


def chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.Namespace:
    """Fill in the defaults that depend on `--files`, and end the program where options exclude each other."""
    if options.files == "checkpoint":
        options.models = options.models or list(MODELS)
        options.formats = options.formats or list(FORMATS)
        options.quantization = options.quantization or list(_QUANTIZATIONS)
        options.contenders = options.contenders or list(CONTENDERS)
        if files := [name for name in options.models if name in INSTALLED]:
            parser.error(f"--models {' '.join(files)}: a GGUF file alone, which needs --files gguf")
        if others := [name for name in options.formats if name not in FORMATS]:
            parser.error(
                f"--formats {' '.join(others)}: only with --files gguf; others: {', '.join(FORMATS)}"
            )
        return options
    if options.quantization:
        parser.error(
            "--quantization has no effect with --files gguf: the formats are those of the files"
        )
    if "transformers" in (options.contenders or ()):
        parser.error("--contenders transformers reads no GGUF file: leave it out, or --files gguf")
    options.models = options.models or list(FILE_MODELS)
    options.formats = options.quantization = options.formats or list(FILE_FORMATS)
    options.contenders = options.contenders or [it for it in CONTENDERS if it != "transformers"]
    return options


class Results:
    """The figures and failures of a run.

    Attributes:
        samples: every figure.
        failures: texts; a part does not run again after its first failure.
        about: what contenders chose by themselves, by model, contender and weights.
        build: of llama.cpp; None if it has no part or cannot be built.
    """

    def __init__(self) -> None:
        self.samples: table.Samples = {}
        self.failures: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}
        self.build: LlamaBuild | None = None

    def add(self, model: str, part: Part, measured: Measured) -> None:
        """Add the figures of a part's round."""
        for metric, value in measured.figures.items():
            self.samples.setdefault((model, *part, metric), []).append(value)
        if measured.about:
            self.about[f"{model}, {part.contender}, {part.weights}"] = measured.about

    def fail(self, what: str, error: BaseException) -> None:
        """Record a failure and print it."""
        text = f"{type(error).__name__}: {error}"
        print(f"FAILED: {what}: {text}", flush=True)
        self.failures.append({"what": what, "error": text})


def measure(round_: Round, todo: list[Part], rounds: int, results: Results) -> None:
    """Run the parts of a model alternately; a part that fails is left out of the later rounds."""
    for number in range(rounds):
        for part in list(todo):
            what = f"{round_.model}, {part.contender}, {part.weights}"
            try:
                with other_load() as load:
                    measured = CONTENDERS[part.contender](round_, part.weights)
            # A contender is another program, which can fail in any way; the others go on.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                results.fail(f"{what}, round {number + 1}", error)
                todo.remove(part)
                continue
            if load:
                measured.figures["other_cores"] = load[0]
            results.add(round_.model, part, measured)
            shown = "  ".join(f"{name}={value:.4g}" for name, value in measured.figures.items())
            print(f"{number + 1}/{rounds}  {what}: {shown}", flush=True)


def compare(options: argparse.Namespace, results: Results) -> None:
    """Build llama.cpp if it takes part, and measure all models."""
    isa = INSTRUCTION_SETS[options.isa]
    contenders = list(options.contenders)
    if set(contenders) & set(_LLAMA) or options.files == "gguf":
        try:
            results.build = build(options.isa, cache=options.cache, version=options.llama_version)
        except Exception as error:  # noqa: BLE001 - the other contenders go on
            results.fail("build of llama.cpp", error)
            contenders = [name for name in contenders if name not in _LLAMA]
    work, same = Work(tokens=options.tokens), options.files == "gguf"
    for model in options.models:
        round_ = Round(
            model, work, options.threads, isa.environment, results.build, same_files=same
        )
        todo = parts(model, contenders, options.quantization, options.formats)
        if same and results.build is None:
            todo = []  # the files cannot be made
        if results.build is not None:
            try:
                round_.files.update(model_files(round_, options.cache, options.formats))
            except Exception as error:  # noqa: BLE001 - the other contenders go on
                results.fail(f"{model}, GGUF files", error)
                todo = [part for part in todo if part.contender not in _LLAMA and not same]
        measure(round_, todo, options.rounds, results)


def read_options() -> argparse.Namespace:
    """Read the command line; end the program if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    every = tuple(dict.fromkeys((*MODELS, *FILE_MODELS)))
    kinds = tuple(dict.fromkeys((*FORMATS, *FILE_FORMATS, *OTHER_FILE_FORMATS)))
    add("--files", choices=("checkpoint", "gguf"), default="checkpoint",
        help="what Tessera reads: a checkpoint that it rounds, or the files of llama.cpp (%(default)s)")  # fmt: skip
    add("--models", nargs="+", choices=every, metavar="NAME", help=", ".join(every))
    add("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME", help=", ".join(CONTENDERS))
    add("--quantization", nargs="+", choices=QUANTIZED, help="of Tessera with a checkpoint")
    add("--formats", nargs="+", choices=kinds, metavar="FORMAT",
        help=f"of llama.cpp: {', '.join(kinds)}")  # fmt: skip
    add("--rounds", type=int, default=5)
    add("--tokens", type=int, default=128, help="new tokens of each sequence")
    add("--isa", choices=INSTRUCTION_SETS, default="native", help="instructions of all contenders")
    cores = sorted(os.sched_getaffinity(0))
    add("--threads", type=int, default=len(cores), help="cores of all contenders")
    add("--cache", type=Path, default=CACHE, help="folder of builds and GGUF files (%(default)s)")
    add("--llama-version", default=VERSION, help="version of llama-cpp-python (%(default)s)")
    add_bookkeeping(parser)
    options = chosen(parser, parser.parse_args())
    if not 0 < options.threads <= len(cores):
        parser.error(f"--threads must be between 1 and {len(cores)}, the cores of this process")
    os.sched_setaffinity(0, cores[: options.threads])
    return options


def main() -> None:
    """Compare, print the ratios and write the result; exit with status 1 if a part failed."""
    options = read_options()
    torch.set_num_threads(options.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that results are written
    results = Results()
    try:
        compare(options, results)
    except KeyboardInterrupt as error:
        results.fail("run", error)
    found = table.ratios(results.samples)
    print(table.render(found))
    disturbed = {key: max(v) for key, v in results.samples.items() if key[-1] == "other_cores"}
    for (model, contender, weights, _), most in disturbed.items():
        if most > LIMIT:
            print(f"WARNING: other programs used {most:.2f} cores: {model}, {contender}, {weights}")
    made = results.build
    llama = None if made is None else {"llama-cpp-python": made.version, "flags": made.flags}
    isa = {"name": options.isa, "environment": INSTRUCTION_SETS[options.isa].environment}
    rows = table.rows(results.samples)
    rows += [
        {"metric": "ratio", **ratio._asdict(), "value": round(ratio.value, 3)} for ratio in found
    ]
    extra = {
        "files": options.files,
        "llama": llama,
        "isa": isa,
        "rounds": options.rounds,
        "about": results.about,
    }
    libraries = ("torch", "transformers", "tokenizers")
    same = () if options.files == "checkpoint" else (options.files,)
    topic = "-".join(("peers", *same, options.isa, *options.models))
    write_report(
        topic, rows, libraries, folder=options.out, revision=options.commit, echo=False,
        extra={**extra, "failures": results.failures},
    )  # fmt: skip
    if results.failures:
        raise SystemExit(f"{len(results.failures)} parts failed")


if __name__ == "__main__":
    main()
