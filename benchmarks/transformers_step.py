"""Times a training step of a model of `transformers` with our attention, with PyTorch's and with standard attention.

    python -m benchmarks.transformers_step [--shape llama-3.2-1b] [--tokens 8192] [--documents 8] [--out results/]

The model has random weights in bfloat16, the optimizer is AdamW, the batch is random tokens: as one sequence, and as
`--documents` documents in one row, whose positions begin at 0 again, as data collators without padding make them.
Every contender takes the batch as `transformers` hands it over: `sdpa` and `eager` then get a mask of [tokens, tokens].
Each has a process of its own, so that it finds all memory free. Needs `transformers`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.report import add_bookkeeping, write_report
from kernels.attention.training import huggingface
from server.cli.bench.engine.options import SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_CONTENDERS = ("tessera", "sdpa", "eager")
_OUT_OF_MEMORY = "out_of_memory"


def make_batch(
    vocabulary: int, tokens: int, documents: int, device: torch.device
) -> dict[str, Tensor]:
    """Return random tokens of documents of equal lengths in one row, with their positions."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, tokens), generator=generator)
    positions = torch.arange(tokens) % -(-tokens // documents)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions[None]}
    return {name: tensor.to(device) for name, tensor in batch.items()}


def measure(
    contender: str, shape: Path, tokens: int, documents: int, device: torch.device, steps: int
) -> dict[str, Any]:
    """Train a model for some steps and return the row of a contender.

    Args:
        contender: name of the attention.
        shape: folder of the model's configuration.
        tokens: of the batch.
        documents: into which the tokens are divided.
        device: of the model.
        steps: that are timed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - not a dependency

    huggingface.register()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(shape)
    with device:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # of transformers
            config, dtype=torch.bfloat16, attn_implementation=contender
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    batch = make_batch(config.vocab_size, tokens, documents, device)

    def step() -> Tensor:
        loss: Tensor = model(**batch, use_cache=False).loss
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    is_gpu = device.type == "cuda"
    first = float(step())  # kernels are compiled here
    step()
    if is_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps - 1):
        step()
    final = float(step())
    seconds = (time.perf_counter() - began) / steps
    return {
        "first_loss": round(first, 4),
        "last_loss": round(final, 4),
        "step_ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(tokens / seconds),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20) if is_gpu else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every contender in a process of its own, and write the result file."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parse(words)
    device = torch.device(options.device)
    if options.only:
        try:
            row = measure(
                options.only, SHAPES / options.shape, options.tokens, options.documents, device,
                options.steps,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            row = {_OUT_OF_MEMORY: True}
        print(json.dumps(row))
        return
    rows = []
    for documents in dict.fromkeys((1, options.documents)):
        for contender in _CONTENDERS:
            command = [sys.executable, "-m", "benchmarks.transformers_step", *words]
            command += [f"--documents={documents}", f"--only={contender}"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = {"contender": contender, "shape": options.shape, "tokens": options.tokens}
            row["documents"] = documents
            rows.append(row | json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
    write_report(
        "transformers-step", rows, ("torch", "triton", "transformers"), device=device.type,
        folder=options.out, revision=options.commit, echo=False,
    )  # fmt: skip


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--shape", default="llama-3.2-1b", help="as for `bench engine` (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="(%(default)s)")
    parser.add_argument("--documents", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="that are timed (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=_CONTENDERS, help="print this contender's row alone")
    add_bookkeeping(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
