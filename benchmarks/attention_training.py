"""Measures attention for training: TFLOP/s of the forward, of the backward and of both, and peak memory.

    python -m benchmarks.attention_training [--lengths 2048 8192 16384] [--head-dims 64 128] [--tune] [--out results/]

The backward counts 2.5 times the operations of the forward, as in the papers; causal attention counts half. Before
anything is timed, results and gradients are compared with those of PyTorch. `--tune` tries tile sizes and prints the
fastest of each kernel.
"""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import kernels
from benchmarks.report import add_bookkeeping, write_report
from kernels.attention import autograd
from kernels.attention.portable import training
from kernels.attention.portable.training_launch import TrainingLaunch, training_launches
from kernels.attention.training import TRAINING_REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_TOKENS = 16384
"""Tokens of a batch: shorter sequences come in greater numbers."""
_PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_CANDIDATES = [
    TrainingLaunch(m, n, warps, stages)
    for m, n, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
]
_KERNELS = ("forward", "backward of keys", "backward of queries")


def inputs(length: int, heads: int, head_dim: int) -> list[Tensor]:
    """Return q, k, v and the gradient of the result, [B, S, H, D] each."""
    count = max(1, _TOKENS // length)
    torch.manual_seed(0)
    return [
        torch.randn(count, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]


def ours(causal: bool) -> Callable[..., Tensor]:
    """Return our attention."""
    return lambda q, k, v: kernels.flash_attention(q, k, v, causal=causal)


def peer(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    """Return PyTorch's attention by one backend."""

    def compute(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            q, k, v = (it.transpose(1, 2) for it in tensors)
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(
                1, 2
            )

    return compute


def measure(compute: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, float]:
    """Return milliseconds of the forward and the backward, and the peak of memory in MiB."""
    *leaves, dout = tensors
    leaves = [it.detach().requires_grad_() for it in leaves]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = compute(*leaves)
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    peak = torch.cuda.max_memory_allocated() - before
    with torch.no_grad():
        forward = do_bench(lambda: compute(*leaves), warmup=20, rep=60)
    backward = do_bench(
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), warmup=20, rep=60
    )
    return {"forward_ms": forward, "backward_ms": backward, "peak_mib": peak / 2**20}


def compare(head_dim: int, causal: bool) -> None:
    """Compare results and gradients with those of PyTorch; raise where they differ."""
    *leaves, dout = (it[:1, :1000] for it in inputs(_TOKENS, 4, head_dim))
    found = []
    for compute in (ours(causal), peer(SDPBackend.MATH, causal)):
        tensors = [it.detach().requires_grad_() for it in leaves]
        out = compute(*tensors)
        found.append([out, *torch.autograd.grad(out, tensors, dout)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=3e-2)


def tune(length: int, head_dim: int) -> None:
    """Print the fastest launches of each kernel."""
    chosen = list(training_launches(kernels.detect("cuda"), head_dim, torch.bfloat16))
    tensors = inputs(length, 16, head_dim)
    portable = next(row for row in TRAINING_REGISTRY if row.name == "portable_backward")
    for number, name in enumerate(_KERNELS):
        timed = []
        for launch in _CANDIDATES:
            tried = tuple(launch if i == number else it for i, it in enumerate(chosen))
            try:
                with (
                    mock.patch.object(training, "training_launches", return_value=tried),
                    mock.patch.object(autograd, "select_training", return_value=portable),
                ):
                    times = measure(ours(causal=False), tensors)
            except Exception as error:  # noqa: BLE001 - a launch may need too much memory
                print(f"{launch}: {str(error)[:60]}")
                continue
            timed.append((times["forward_ms"] if not number else times["backward_ms"], launch))
        timed.sort(key=lambda it: it[0])
        chosen[number] = timed[0][1]
        for milliseconds, launch in timed[:10]:
            print(f"D={head_dim} {name}: {milliseconds:.3f} ms {launch}", flush=True)


def main() -> None:
    """Compare, then measure every combination and print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--peers", nargs="*", choices=_PEERS, default=list(_PEERS))
    parser.add_argument("--tune", action="store_true", help="find the fastest tiles instead")
    add_bookkeeping(parser)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for head_dim, causal in itertools.product(options.head_dims, (False, True)):
        compare(head_dim, causal)
    if options.tune:
        for head_dim in options.head_dims:
            tune(options.lengths[-1], head_dim)
        return
    print("TFLOP/s             D  length  mask    forward backward   both  peak MiB")
    for head_dim, length, causal in itertools.product(
        options.head_dims, options.lengths, (False, True)
    ):
        heads = 2048 // head_dim
        tensors = inputs(length, heads, head_dim)
        work = 4 * tensors[0].numel() * length / (2 if causal else 1)
        contenders = {"tessera": ours(causal)}
        contenders |= {name: peer(_PEERS[name], causal) for name in options.peers}
        for name, compute in contenders.items():
            try:
                times = measure(compute, tensors)
            except torch.OutOfMemoryError:
                row = {"kernel": name, "head_dim": head_dim, "length": length, "causal": causal}
                rows.append(row | {"out_of_memory": True})
                print(f"{name:16} {head_dim:4} {length:7}  does not fit in memory", flush=True)
                torch.cuda.empty_cache()
                continue
            both = times["forward_ms"] + times["backward_ms"]
            rates = {
                "forward": work / times["forward_ms"] / 1e9,
                "backward": 2.5 * work / times["backward_ms"] / 1e9,
                "both": 3.5 * work / both / 1e9,
            }
            rows.append(
                {"kernel": name, "head_dim": head_dim, "length": length, "causal": causal}
                | times
                | rates
            )
            print(
                f"{name:16} {head_dim:4} {length:7}  {'causal' if causal else 'all':6}"
                f" {rates['forward']:8.0f} {rates['backward']:8.0f} {rates['both']:6.0f} {times['peak_mib']:9.0f}",
                flush=True,
            )
    write_report(
        "attention-training", rows, ("torch", "triton"), device="cuda", folder=options.out, revision=options.commit
    )  # fmt: skip


if __name__ == "__main__":
    main()
