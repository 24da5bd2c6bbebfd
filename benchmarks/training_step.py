"""Times a training step of the bundled model with our attention and with PyTorch's: tokens per second, peak memory.

    python -m benchmarks.training_step [--model student] [--data build/training-data] [--out results/]

The batch is that of the recipe: whole documents, one after the other. Ours reads them as they are; PyTorch's function
takes sequences of one length, so its queries, keys and values are padded to the longest document, and the results are
cut out. `sdpa` is the backend that PyTorch chooses, `math` standard attention. The rest of the step is the same, and so
is the loss. Each contender has a process of its own, so that it finds all memory free.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.report import add_bookkeeping, write_report
from model.training.loop import Shape, Stage, autocast, learning_rate, model_config
from model.training.network import TrainedLM, attend_packed, training_loss
from model.training.optimizer import MuonAdamW
from model.training.prepare import CONTEXT_LENGTH
from model.training.streams import PackedTokens, TokenStreams, pack, to_device
from model.training.train import STUDENT, TEACHER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from model.training.network import PackedAttend

_MODELS = {
    "student": STUDENT,
    "teacher": TEACHER,
    "tiny": Stage("tiny", Shape(64, 1, 1, 1, 64), batch_tokens=256, lengths=(64,)),
}
_CONTENDERS = ("tessera", "sdpa", "math")
_VOCABULARY = 4096
_OUT_OF_MEMORY = "out_of_memory"


def padded(batch: PackedTokens, backend: SDPBackend | None) -> PackedAttend:
    """Return attention of one batch by PyTorch's function, over documents that are padded to the longest.

    Args:
        batch: its documents give the places of the padding, once for all layers and steps.
        backend: None for PyTorch's choice.
    """
    lengths = batch.cu_seqlens.diff()
    lengths = lengths[lengths > 0]
    longest = int(lengths.max())
    places = torch.arange(longest, device=lengths.device)[None] < lengths[:, None]
    rows = places.flatten().nonzero()[:, 0]
    size = (len(lengths), longest)

    def widen(tensor: Tensor) -> Tensor:
        empty = tensor.new_zeros((size[0] * size[1], *tensor.shape[1:]))
        filled = empty.index_copy(0, rows, tensor)
        return filled.view(*size, *tensor.shape[1:]).transpose(1, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, _cu_seqlens: Tensor) -> Tensor:
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(
                widen(q), widen(k), widen(v), is_causal=True, enable_gqa=True
            )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, rows)

    return attend


def make_batch(stage: Stage, data: Path | None, device: torch.device) -> tuple[PackedTokens, int]:
    """Return a batch of the prepared data, or of random tokens in documents of the same lengths, and the vocabulary."""
    if data is not None:
        streams = TokenStreams(data, stage.stream_weights)
        vocabulary = len(json.loads((data / "tokenizer.json").read_text())["model"]["vocab"])
        batch = streams.batch(
            0, 0, stage.batch_tokens, lengths=stage.lengths, start_share=stage.start_share,
            split=stage.split, infilling_share=stage.infilling_share,
        )  # fmt: skip
        return to_device(batch, device), vocabulary
    generator = np.random.default_rng(0)
    # As in the streams: half of the documents are cut, and the others are mostly short functions.
    count = 1 + stage.batch_tokens // 32
    sampled = np.exp(generator.normal(4.8, 1.0, count)).astype(int) + 2
    sizes = np.minimum(sampled, generator.choice(np.array(stage.lengths), count))
    owner = np.repeat(np.arange(count), sizes)
    tokens = generator.integers(0, _VOCABULARY, len(owner))
    return to_device(pack(tokens, owner, stage.batch_tokens), device), _VOCABULARY


def measure(
    contender: str,
    stage: Stage,
    data: Path | None,
    device: torch.device,
    steps: int,
    *,
    compiled: bool,
) -> dict[str, Any]:
    """Train one model for some steps on one batch and return the row of a contender."""
    torch.set_float32_matmul_precision("high")
    batch, vocabulary = make_batch(stage, data, device)
    model = TrainedLM(model_config(stage.shape, vocabulary), stage.dropout, device)
    model.init_weights(seed=0)
    model.attend = {
        "tessera": attend_packed,
        "sdpa": padded(batch, None),
        "math": padded(batch, SDPBackend.MATH),
    }[contender]
    optimizer = MuonAdamW(model.named_parameters(), stage.weight_decay)
    loss_of = torch.compile(training_loss, dynamic=False) if compiled else training_loss
    model.train()
    torch.manual_seed(0)

    def step() -> Tensor:
        with autocast(device):
            loss = loss_of(model, batch, (), 0.0)
        torch.autograd.backward(loss)
        optimizer.step(learning_rate(stage, 0.1))
        return loss.detach()

    began = time.perf_counter()
    first = float(step())
    compiling = time.perf_counter() - began
    step()
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps - 1):
        step()
    last = step()
    _synchronize(device)
    seconds = (time.perf_counter() - began) / steps
    lengths = batch.cu_seqlens.diff()
    return {
        "first_loss": round(first, 4),
        "last_loss": round(float(last), 4),
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(stage.batch_tokens / seconds),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20)
        if device.type == "cuda"
        else None,
        "first_step_s": round(compiling, 1),
        "documents": int((lengths > 0).sum()),
        "longest": int(lengths.max()),
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every contender in a process of its own, and write the result file."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(words)
    stage = _MODELS[options.model]
    device = torch.device(options.device)
    if options.only:
        try:
            row = measure(
                options.only, stage, options.data, device, options.steps, compiled=options.compile
            )
        except torch.OutOfMemoryError:
            row = {_OUT_OF_MEMORY: True}
        print(json.dumps(row))
        return
    rows = []
    for contender in _CONTENDERS:
        command = [sys.executable, "-m", "benchmarks.training_step", *words, "--only", contender]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = {"contender": contender, "model": options.model, "batch_tokens": stage.batch_tokens}
        rows.append(row | json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    write_report(
        "training-step", rows, device=device.type, folder=options.out, revision=options.commit, echo=False,
        extra={"context": CONTEXT_LENGTH, "compiled": options.compile},
    )  # fmt: skip


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=_MODELS, default="student")
    parser.add_argument("--data", type=Path, help="written by `prepare`; default: random tokens")
    parser.add_argument("--steps", type=int, default=20, help="that are timed (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    parser.add_argument("--only", choices=_CONTENDERS, help="print this contender's row alone")
    add_bookkeeping(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
