"""Measures what quantized weights cost: bits per byte, and agreement with float32, on held-out text.

    python -m benchmarks.precision [--model bundled] [--quantization none int8 int4] [--choices] [--tokens N]

The text is that of `python -m model.training.evaluate`: files of the standard library that the bundled model was not
trained on, in the same windows. Every precision predicts the same tokens from the same text, so the differences are
less uncertain than the figures themselves. Precisions that this CPU can serve are computed as they are served, by the
C library; the others, and with --choices also other ways to round, by `benchmarks.quantized_model` in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from tqdm import tqdm

from benchmarks.quantized_model import QuantizedLM, Scheme
from benchmarks.report import add_bookkeeping, write_report
from kernels.cpu.library import instructions
from model.checkpoint.config import ModelConfig
from model.checkpoint.dtypes import stored_dtype
from model.checkpoint.weights import load_model
from model.device.kv_cache import KVCache
from model.device.quantizations import QUANTIZATIONS
from model.executors import cpu_library
from model.executors.columns import Bucket
from model.executors.step import StepInput
from model.hub.resolve import resolve
from model.training.corpus import SourceFile, read_source
from model.training.evaluate import scoring_windows
from model.training.prepare import CONTEXT_LENGTH
from server.cli.bench.result import model_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from kernels.weight_format import WeightFormat
    from model.decoder import DecoderLM

_BLOCK_SIZE: Final = 16
_ROWS: Final = 256
"""Tokens whose logits are in memory at a time."""


class Predictor(Protocol):
    """A model that predicts the next tokens of a text."""

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the hidden states [1, T, C] of a sequence [1, T] at positions [T]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [M, V] float32 of hidden states [M, C]."""


class ServedModel:
    """A model with quantized weights as it is served on a CPU: steps of one prompt over a KV cache.

    Args:
        model: not yet packed; `model.executors.cpu_library.unsupported` must be empty for it.
        quantization: "int8", "int4", or the format of its matrices.
    """

    def __init__(self, model: DecoderLM, quantization: str | WeightFormat) -> None:
        self._model = model
        form = QUANTIZATIONS[quantization] if isinstance(quantization, str) else quantization
        model.optimize(form, torch.get_num_threads())
        state = model.network.state(model.cache_dtype)
        self._cache = KVCache(state, -(-CONTEXT_LENGTH // _BLOCK_SIZE), _BLOCK_SIZE, "cpu")

    def __call__(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the logits [1, T, V] in place of hidden states: an executor keeps these to itself."""
        tokens = len(positions)
        columns = -(-tokens // _BLOCK_SIZE)
        bucket = Bucket(
            rows=0, prompt_tokens=tokens, prompt_seqs=1, columns=columns, num_logits=tokens
        )
        step = StepInput(bucket, _BLOCK_SIZE, torch.device("cpu"))
        host = step.host
        host.token_ids[:] = input_ids[0].numpy()
        host.positions[:] = host.slot_mapping[:] = positions.numpy()
        host.logits_rows[:] = np.arange(tokens)
        host.prompt_cu_seqlens[:] = 0, tokens
        host.prompt_seq_lens[:] = tokens
        host.prompt_block_table[:] = np.arange(columns)
        step.send()
        return self._model.step(step, self._cache).logits[None]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, as `__call__` does."""
        return hidden


class Choice(NamedTuple):
    """How a model is rounded: the products of its layers, and its head and embedding."""

    layers: Scheme
    head: Scheme

    def describe(self) -> dict[str, Any]:
        """Return the entries of a result's row."""
        layers = self.layers
        return {
            "layers": f"int{layers.bits}",
            "head": f"int{self.head.bits}",
            "group": layers.group,
            "weight_scales": "of outputs" if layers.by_row else "of groups",
            "activations": "int8" if layers.activations else "float32",
            "scales": "refined" if layers.refined and layers.bits == 4 else "largest",
        }


def _both(scheme: Scheme) -> Choice:
    return Choice(scheme, scheme)


PRECISIONS: Final[Mapping[str, Choice]] = {
    "int8": _both(Scheme(8)),
    "int4": Choice(Scheme(4), Scheme(8)),
}
"""The values of `--quantization` besides none, rounded as the C library does."""

_INT8: Final = Scheme(8)
CHOICES: Final[Mapping[str, tuple[Choice, ...]]] = {
    "int8": (
        _both(Scheme(8, activations=False)),
        _both(Scheme(8, by_row=True)),
        _both(Scheme(8, 64)),
        _both(Scheme(8, 64, by_row=True)),
    ),
    "int4": (
        Choice(Scheme(4, activations=False), Scheme(8, activations=False)),
        Choice(Scheme(4, refined=False), _INT8),
        _both(Scheme(4)),
        Choice(Scheme(4, 64), _INT8),
    ),
}
"""Other ways to round, which show what each choice of a precision costs."""


@dataclass
class Score:
    """The predictions of one model over all tokens so far.

    Attributes:
        bits: negative log2 probabilities of the text's tokens, summed.
        agreements: tokens whose most probable prediction is that of the float32 model.
        divergences: of each token, the divergence from the float32 model's distribution, in nats.
    """

    bits: float = 0.0
    agreements: int = 0
    divergences: list[Tensor] = field(default_factory=list)

    def add(self, expected: Tensor, found: Tensor, targets: Tensor) -> None:
        """Count predictions.

        Args:
            expected: [T, V] log-probabilities of the float32 model.
            found: [T, V] those of this model.
            targets: [T] the text's tokens.
        """
        self.bits -= found.gather(-1, targets[:, None]).double().sum().item() / math.log(2)
        self.agreements += int((expected.argmax(-1) == found.argmax(-1)).sum())
        divergence = functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
        self.divergences.append(divergence.clamp(min=0.0))  # sums of rounded terms around 0

    def figures(self, exact: Score, num_bytes: int) -> dict[str, float]:
        """Return the entries of a result's row.

        Args:
            exact: the float32 model's score.
            num_bytes: of the text.
        """
        divergence = torch.cat(self.divergences).double().numpy()
        return {
            "value": round(self.bits / num_bytes, 5),
            "loss_percent": round(100 * (self.bits / exact.bits - 1), 3),
            "agreement_percent": round(100 * self.agreements / len(divergence), 2),
            "divergence_mean": float(f"{divergence.mean():.3g}"),
            "divergence_p99": float(f"{np.percentile(divergence, 99):.3g}"),
        }


def held_out_files() -> list[SourceFile]:
    """Read the bundled model's held-out files from the standard library of the running interpreter.

    Raises:
        SystemExit: it is another version of Python, or its files differ.
    """
    data = json.loads((resolve("bundled") / "evaluation.json").read_text())["data"]
    folder = Path(sysconfig.get_paths()["stdlib"])
    needed, held_out = data["prepared_with"], data["held_out"]
    if folder.name != data["versions"][0]:
        raise SystemExit(f"the held-out files are those of {needed}; this is {folder}")
    texts = [read_source(folder / path, path)[0] for path in held_out["paths"]]
    files = [
        SourceFile(folder.name, path, text)
        for path, text in zip(held_out["paths"], texts, strict=True)
    ]
    found = sum(len(file.text.encode()) for file in files)
    if found != held_out["bytes"]:
        raise SystemExit(
            f"the held-out files have {found} bytes in {folder}, {held_out['bytes']} in {needed}"
        )
    return files


def select_documents(
    texts: Sequence[str], tokenizer: Tokenizer, limit: int | None
) -> list[tuple[int, list[int]]]:
    """Tokenize texts, in an order that does not depend on `limit`, until there are enough tokens.

    Args:
        texts: the files.
        tokenizer: the model's.
        limit: tokens after which no file is added; None for all files.

    Returns:
        The bytes and tokens of each file.
    """
    documents: list[tuple[int, list[int]]] = []
    total = 0
    for index in np.random.default_rng(0).permutation(len(texts)):
        if limit is not None and total >= limit:
            break
        ids = tokenizer.encode(texts[index]).ids
        documents.append((len(texts[index].encode()), ids))
        total += len(ids)
    return documents


@torch.no_grad()
def score(
    exact: Predictor, others: Sequence[Predictor], documents: Iterable[Sequence[int]]
) -> list[Score]:
    """Score all models on the same tokens; the first result is that of `exact`."""
    models: list[Predictor] = [exact, *others]
    scores = [Score() for _ in models]
    for ids in documents:
        for tokens, context in scoring_windows(ids):
            window = torch.tensor(tokens)
            positions = torch.arange(len(window) - 1)
            targets = torch.split(window[1 + context :], _ROWS)
            hidden = [model(window[None, :-1], positions)[0, context:] for model in models]
            for first, wanted in zip(range(0, len(hidden[0]), _ROWS), targets, strict=True):
                expected = None
                for model, rows, result in zip(models, hidden, scores, strict=True):
                    found = model.logits(rows[first : first + _ROWS]).log_softmax(-1)
                    expected = found if expected is None else expected
                    result.add(expected, found, wanted)
    return scores


def main() -> None:
    """Measure from command-line arguments and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled", help="as for `tessera serve`")
    parser.add_argument(
        "--quantization", nargs="+", choices=("none", *PRECISIONS), default=["none", *PRECISIONS]
    )
    parser.add_argument(
        "--choices", action="store_true", help="also measure other ways to round, for comparison"
    )
    parser.add_argument("--tokens", type=int, help="use about so many tokens of the text")
    add_bookkeeping(parser)
    options = parser.parse_args()
    path = resolve(options.model)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = [file.text for file in held_out_files()]
    documents = select_documents(texts, tokenizer, options.tokens)
    config = ModelConfig.from_folder(path)
    exact = load_model(path, config, torch.float32, "cpu", pack=False)
    entries, models = _precisions(path, config, exact, options)
    num_bytes = sum(size for size, _ in documents)
    scores = score(exact, models, tqdm([ids for _, ids in documents], desc="held-out files"))
    rows = [
        {
            "model": model_label(options.model),
            "metric": "bits_per_byte",
            **described,
            **result.figures(scores[0], num_bytes),
        }
        for described, result in zip([{"quantization": "none"}, *entries], scores, strict=True)
        if described["quantization"] in options.quantization
    ]
    write_report(
        "roundings" if options.choices else "precision",
        rows,
        folder=options.out,
        revision=options.commit,
        extra={
            "files": len(documents),
            "bytes": num_bytes,
            "tokens": sum(len(ids) - 1 for _, ids in documents),
        },
    )


def _precisions(
    path: Path, config: ModelConfig, exact: DecoderLM, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[Predictor]]:
    """Make the models to compare with float32.

    Returns:
        Of each, the entries of its row, and the model.
    """
    entries: list[dict[str, Any]] = []
    models: list[Predictor] = []
    reasons = cpu_library.unsupported(config.network)
    if reasons:
        print(f"the C library cannot serve {options.model} here: {'; '.join(reasons)}")
    for name in options.quantization:
        if name == "none":
            continue
        if not reasons:
            computed = f"library, {instructions()}"
            entries.append(
                {"quantization": name, "computed": computed, **PRECISIONS[name].describe()}
            )
            held = load_model(
                path,
                config,
                stored_dtype(config),
                "cpu",
                pack=False,
                weight_format=config.stored_format,
            )
            models.append(ServedModel(held, name))
        rounded = (PRECISIONS[name],) if reasons or options.choices else ()
        for choice in (*rounded, *(CHOICES[name] if options.choices else ())):
            entries.append({"quantization": name, "computed": "float32", **choice.describe()})
            models.append(QuantizedLM(exact, choice.layers, choice.head))
    return entries, models


if __name__ == "__main__":
    main()
