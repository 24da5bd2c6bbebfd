"""Compares every family and every stored format with `transformers`, through the engine of the service, on a CPU.

    python -m benchmarks.parity [--only NAME ...]

A family is served from a tiny random checkpoint of each of its variants, a format from one in it, which `transformers`
gets as the dequantized weights that the format's own library, or its formula, gives. Both continue a prompt greedily;
the result has the tokens that are equal and the largest difference of their log-probabilities. `docs/models.md` shows
the newest result.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.local_engine import LocalEngine
from benchmarks.report import add_bookkeeping, write_report
from model.checkpoint.config import ModelConfig
from model.executors import cpu_library, single_launch, support
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from tests.model.checkpoint.format_samples import SAMPLES
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE
from tests.model.oracle import generated

TOKENS: Final = 120
_PROMPT: Final = tuple(range(3, 100, 4))


class Parity(NamedTuple):
    """How a model compares with `transformers`.

    Attributes:
        tokens: generated ones that are equal, from the first on.
        difference: the largest of the log-probabilities of these.
        held: the format in which the service held the matrices of the layers, as `GET /info` names it.
    """

    tokens: int
    difference: float
    held: str


def compared(folder: Path, exact: Path, tokens: int = TOKENS, **settings: Any) -> Parity:  # noqa: ANN401 - of any type
    """Serve a checkpoint and compare it with `transformers`.

    Args:
        folder: the checkpoint.
        exact: a checkpoint with the same values as full numbers, which may be the same one.
        tokens: to generate.
        settings: of `EngineConfig`, other than those that serve exact numbers.
    """
    given: dict[str, Any] = {
        "model_path": str(folder), "model_id": "tiny", "device": "cpu", "dtype": "float32", "max_model_len": 256,
        "kv_cache_tokens": 1024, "cpu_threads": 1, "quantization": "none",
    }  # fmt: skip
    engine = LocalEngine(EngineConfig(**given | settings))
    try:
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0, logprobs=True)
        request = GenerateRequest(request_id=0, prompt_token_ids=list(_PROMPT), sampling=sampling)
        (events,) = engine.generate([request])
        held = engine.engine.info.quantization
    finally:
        engine.close()
    ids, theirs = _expected(exact, tokens)
    equal = next(
        (at for at, event in enumerate(events) if event.token_id != ids[at]),
        min(tokens, len(events)),
    )
    differences = (abs((events[at].logprob or 0.0) - theirs[at]) for at in range(equal))
    return Parity(equal, max(differences, default=0.0), held)


def _expected(folder: Path, tokens: int) -> tuple[list[int], list[float]]:
    """Return the tokens that `transformers` generates, and their log-probabilities."""
    (architecture,) = AutoConfig.from_pretrained(folder).architectures
    # By its class, because models of text and images have no automatic one.
    model = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    found = generated(model, _PROMPT, tokens)
    return found.tokens, found.logprobs


def format_rows(names: list[str]) -> list[dict[str, Any]]:
    """Return the result of each sample of each format, or of the named ones."""
    rows = []
    for name, samples in SAMPLES.items():
        for sample, save in samples.items() if not names or name in names else ():
            with tempfile.TemporaryDirectory() as folder:
                stored, exact = save(Path(folder))
                found, form = compared(stored, exact), ModelConfig.from_folder(stored).weight_format
            row = {"kind": "format", "name": name, "sample": sample, **found._asdict()}
            rows.append(row | {"format": None if form is None else dataclasses.asdict(form)})
    return rows


def family_rows(names: list[str]) -> list[dict[str, Any]]:
    """Return the result of each variant of each family, or of the named ones."""
    rows = []
    for name, case in CASES.items():
        if names and case.served not in names:
            continue
        with tempfile.TemporaryDirectory() as place:
            folder, exact = Path(place) / "served", Path(place) / "exact"
            case.save(folder)
            case.exact.save(exact)
            config = ModelConfig.from_folder(folder)
            found = compared(folder, exact, max_model_len=min(256, config.max_context))
        row = {"kind": "family", "name": case.served, "sample": name, **found._asdict()}
        paths = {
            path: not support.unsupported(config.network, executor.READS, executor.VARYING)
            for path, executor in (("single_launch", single_launch), ("cpu_library", cpu_library))
        }
        rows.append(row | paths)
    return rows


def main() -> None:
    """Compare everything and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", default=[], help="formats and architectures; default all"
    )
    add_bookkeeping(parser)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    rows = format_rows(args.only) + family_rows(args.only)
    extra = {"tokens": TOKENS, "vocabulary": VOCAB_SIZE}
    libraries = ("torch", "transformers", "compressed-tensors")
    write_report("parity", rows, libraries, folder=args.out, revision=args.commit, extra=extra)


if __name__ == "__main__":
    main()
