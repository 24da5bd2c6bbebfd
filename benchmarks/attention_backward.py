"""Times the backward of attention by rows of the training registry, beside cuDNN: TFLOP/s, and each launch.

    python -m benchmarks.attention_backward --rows portable_backward hopper_backward --seconds 60 [--out results/]

It counts 2.5 times the operations of the forward; causal attention counts half. Gradients are compared with those of
PyTorch before they are timed. `--seconds` ends the program, in case a kernel hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend
from triton.testing import do_bench

from benchmarks.attention_training import (
    COLUMNS,
    COMPARED_TOKENS,
    MASKS,
    TOKENS,
    inputs,
    ours,
    peer,
)
from benchmarks.report import add_bookkeeping, write_report
from kernels.attention.training import autograd
from kernels.attention.training.registry import TRAINING_REGISTRY

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.attention.training.registry import TrainingSpec

_CUDNN = "cudnn"
_ROWS = {row.name: row for row in TRAINING_REGISTRY if row.sm is not None}


class Backward:
    """The backward of a problem by a row, or by cuDNN or another peer."""

    def __init__(
        self, tensors: list[Tensor], causal: bool, row: TrainingSpec | None, backend: SDPBackend
    ) -> None:
        *leaves, self._dout = tensors
        self._leaves = [it.detach().requires_grad_() for it in leaves]
        self._row = row
        compute = peer(backend, causal) if row is None else ours(causal)
        with self._selected():
            self._out = compute(*self._leaves)

    def __call__(self) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v."""
        with self._selected():
            return torch.autograd.grad(self._out, self._leaves, self._dout, retain_graph=True)

    def _selected(self) -> contextlib.AbstractContextManager[object]:
        if self._row is None:
            return contextlib.nullcontext()
        # A mock instead of a function would take the host longer than some backwards take the GPU.
        return mock.patch.object(autograd, "select_training", self._choose)

    def _choose(self, *_problem: object) -> TrainingSpec | None:
        return self._row


def compare(head_dim: int, causal: bool, name: str) -> None:
    """Compare the gradients of a row with those of PyTorch; raise where they differ."""
    tensors = _inputs(COMPARED_TOKENS, head_dim, COMPARED_TOKENS)
    expected = Backward(tensors, causal, None, SDPBackend.MATH)()
    found = Backward(tensors, causal, _ROWS[name], SDPBackend.MATH)()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=3e-2)


def _inputs(length: int, head_dim: int, tokens: int) -> list[Tensor]:
    return inputs(length, COLUMNS // head_dim, head_dim, tokens, "cuda")


def launches(backward: Backward) -> list[tuple[str, float]]:
    """Return the name and the microseconds of each launch of a backward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backward()
        torch.cuda.synchronize()
    return [
        (event.name[:60], event.time_range.elapsed_us())
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]


def main() -> None:
    """Compare, then measure every combination and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=_ROWS, default=list(_ROWS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--seconds", type=float, help="end the program after this time")
    add_bookkeeping(parser)
    options = parser.parse_args()
    if options.seconds is not None:
        faulthandler.dump_traceback_later(options.seconds, exit=True)
    for head_dim, mask, name in itertools.product(options.head_dims, options.masks, options.rows):
        compare(head_dim, MASKS[mask], name)
    rows: list[dict[str, Any]] = []
    print("TFLOP/s             D  length  mask    backward  launches, us")
    for head_dim, length, mask, name in itertools.product(
        options.head_dims, options.lengths, options.masks, [*options.rows, _CUDNN]
    ):
        tensors = _inputs(length, head_dim, TOKENS)
        causal = MASKS[mask]
        work = 4 * tensors[0].numel() * length / (2 if causal else 1)
        backward = Backward(tensors, causal, _ROWS.get(name), SDPBackend.CUDNN_ATTENTION)
        milliseconds = do_bench(backward, warmup=20, rep=60)
        rate = 2.5 * work / milliseconds / 1e9
        parts = launches(backward)
        rows.append(
            {
                "row": name, "head_dim": head_dim, "length": length, "causal": causal,
                "backward_ms": milliseconds, "backward": rate, "launches": parts,
            }
        )  # fmt: skip
        text = ", ".join(f"{microseconds:.0f}" for _, microseconds in parts)
        print(f"{name:17} {head_dim:4} {length:6}  {mask:6} {rate:9.0f}  {text}", flush=True)
    write_report(
        "attention-backward", rows, ("torch", "triton"), device="cuda", folder=options.out, revision=options.commit
    )  # fmt: skip


if __name__ == "__main__":
    main()
