"""The contenders: each starts its program, does the work once, and ends the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.cpu_peers.streams import MODEL_NAME, Llama, memory_mib, tokens_per_second
from benchmarks.service import free_port, service, serving
from model.checkpoint.config import ModelConfig
from model.hub.installed_models import INSTALLED
from model.hub.resolve import BUNDLED, resolve
from server.cli.bench.engine.options import SHAPES
from server.cli.bench.serve.apis import OpenAI

if TYPE_CHECKING:
    from benchmarks.cpu_peers.build import LlamaBuild
    from benchmarks.cpu_peers.work import Work

Figures = dict[str, float]
"""Figures of one round, by metric: `decode_N` and `http_N`, tokens per second of N streams; `prefill_N`, tokens per
second of a prompt of N tokens; `<rss or pss>_<loaded or used>`, MiB; `other_cores`, cores that other programs used."""

_WARM_TOKENS = 8
_TIMEOUT = 1800.0
"""Seconds for one round of a contender without HTTP."""


class Measured(NamedTuple):
    """One round of a contender.

    Attributes:
        figures: by metric.
        about: what the contender chose by itself, such as its dtype.
    """

    figures: Figures
    about: dict[str, Any] = {}  # noqa: RUF012 - never changed


class ContenderError(Exception):
    """A contender failed; the text says why."""


@dataclass(frozen=True, slots=True)
class Round:
    """What all contenders of a model share.

    Attributes:
        model: "bundled", the name of a shape, or a model of a Python package.
        work: to measure.
        threads: of llama.cpp.
        environment: variables that limit the instructions of Tessera and `transformers`.
        build: of llama.cpp; None where it does not take part.
        files: GGUF file of each format.
        same_files: whether Tessera reads these too, in place of a checkpoint that it rounds.
    """

    model: str
    work: Work
    threads: int
    environment: dict[str, str]
    build: LlamaBuild | None = None
    files: dict[str, Path] = field(default_factory=dict)
    same_files: bool = False

    @property
    def folder(self) -> Path:
        """Folder of the model's config.json; the file of a model of a Python package."""
        is_stored = self.model == BUNDLED or self.model in INSTALLED
        return resolve(self.model) if is_stored else SHAPES / self.model

    @property
    def program(self) -> LlamaBuild:
        """The build of llama.cpp."""
        assert self.build is not None
        return self.build

    def settings(self, weights: str) -> list[str]:
        """Return the flags of Tessera for a value of `--quantization`, or for the file of a format."""
        if self.same_files:
            return [f"--model={self.files[weights]}", "--device=cpu"]
        dummy = [] if self.model == BUNDLED else ["--load-format=dummy"]
        return [f"--model={self.folder}", *dummy, "--device=cpu", f"--quantization={weights}"]

    def prompts(self, streams: int) -> list[list[int]]:
        """Return random prompts without the ids of bytes and of most special tokens."""
        vocabulary = ModelConfig.from_folder(self.folder).network.vocab
        shape = (streams, self.work.prompt)
        drawn: list[list[int]] = np.random.default_rng(0).integers(300, vocabulary, shape).tolist()
        return drawn


def llama_bench(round_: Round, weights: str) -> Measured:
    """Measure llama.cpp without HTTP."""
    work = round_.work
    program = [round_.program.program("llama-bench"), "-m", str(round_.files[weights])]
    program += ["-t", str(round_.threads), "-r", "1", "-o", "json"]
    prompts = ",".join(map(str, work.prefills))
    figures = read_llama_bench(_output([*program, "-p", prompts, "-n", "0"]))
    decode = ["-p", "0", "-n", str(work.tokens), "-d", str(work.prompt)]
    return Measured(figures | read_llama_bench(_output([*program, *decode])))


def read_llama_bench(text: str) -> Figures:
    """Return the figures of llama-bench's JSON.

    Raises:
        ContenderError: it is not the output of llama-bench.
    """
    try:
        tests = json.loads(text)
        return {
            f"prefill_{test['n_prompt']}" if test["n_prompt"] else "decode_1": float(test["avg_ts"])
            for test in tests
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ContenderError(f"llama-bench wrote {text[:200]!r}: {error!r}") from None


def llama_server(round_: Round, weights: str) -> Measured:
    """Measure llama.cpp's server, started anew with as many slots as streams."""
    work = round_.work
    figures: Figures = {}
    for streams in work.streams:
        port = free_port()
        context = streams * (work.prompt + work.tokens + 64)
        command = [
            round_.program.program("llama-server"), "-m", str(round_.files[weights]), "--host", "127.0.0.1",
            "--port", str(port), "-t", str(round_.threads), "-tb", str(round_.threads), "-np", str(streams),
            "-c", str(context), "--no-kv-unified", "--no-cache-prompt", "--cache-ram", "0",
            "--offline", "--no-ui", "-lv", "1",
        ]  # fmt: skip
        with serving(command, port) as (url, _):
            figures |= _stream(round_, url, Llama(), (streams,))
    return Measured(figures)


def tessera_service(round_: Round, weights: str) -> Measured:
    """Measure `tessera serve`."""
    options = [*round_.settings(weights), f"--served-model-name={MODEL_NAME}"]
    with service(options, round_.environment) as (url, _):
        with urllib.request.urlopen(f"{url}/info") as reply:  # noqa: S310
            info = json.loads(reply.read())
        about = {name: info[name] for name in ("quantization", "model_dtype") if name in info}
        return Measured(_stream(round_, url, OpenAI(), round_.work.streams), about)


def tessera_engine(round_: Round, weights: str) -> Measured:
    """Measure Tessera's engine without HTTP."""
    settings = [*round_.settings(weights), "--enable-prefix-caching=false"]
    return _child(round_, "engine", settings)


def transformers(round_: Round, _weights: str) -> Measured:
    """Measure `transformers`."""
    return _child(round_, "transformers", [str(round_.folder)])


def _child(round_: Round, contender: str, arguments: list[str]) -> Measured:
    variables = [f"{name}={value}" for name, value in round_.environment.items()]
    module = [sys.executable, "-m", "benchmarks.cpu_peers.child", contender]
    out = _output(["env", *variables, *module, f"--work={round_.work.encode()}", *arguments])
    return Measured(**json.loads(out.splitlines()[-1]))


def _stream(round_: Round, url: str, api: OpenAI | Llama, streams: tuple[int, ...]) -> Figures:
    """Measure a server with each number of streams, and its memory before and after."""
    figures = {f"{name}_loaded": mib for name, mib in memory_mib(os.getpid()).items()}
    for number in streams:
        prompts = round_.prompts(number)
        tokens_per_second(url, api, prompts, _WARM_TOKENS)
        figures[f"http_{number}"] = tokens_per_second(url, api, prompts, round_.work.tokens)
    return figures | {f"{name}_used": mib for name, mib in memory_mib(os.getpid()).items()}


def _output(command: list[str]) -> str:
    """Run a program and return its standard output.

    Raises:
        ContenderError: the program failed; with the last lines of its messages.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-5:])
        raise ContenderError(f"{command[0]} failed with status {done.returncode}: {last}")
    return done.stdout


CONTENDERS = {
    "llama-bench": llama_bench,
    "llama-server": llama_server,
    "engine": tessera_engine,
    "service": tessera_service,
    "transformers": transformers,
}
