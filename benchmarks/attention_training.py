"""Measures attention for training: TFLOP/s of the forward, of the backward and of both, and peak memory.

    python -m benchmarks.attention_training [--lengths 2048 8192 16384] [--head-dims 64 128] [--tune] [--out results/]
    python -m benchmarks.attention_training --masks causal --head-dims 128 --lengths 128 512 2048 8192 32768 131072

The backward counts 2.5 times the operations of the forward, as in the papers; causal attention counts half. Before
anything is timed, results and gradients are compared with those of PyTorch. What does not fit in memory says so.
`--tune` tries tile sizes and prints the fastest of each kernel.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

import kernels
from benchmarks.attention_inputs import peak_mib
from benchmarks.report import add_bookkeeping, write_report
from kernels.attention.training import autograd
from kernels.attention.training.portable import launch as training
from kernels.attention.training.portable.launch import TrainingLaunch, training_launches
from kernels.attention.training.registry import TRAINING_REGISTRY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

TOKENS = 16384
"""Tokens of a batch: shorter sequences come in greater numbers."""
COLUMNS = 2048
"""Columns of all heads together."""
COMPARED_TOKENS = 1000
"""Tokens of a sequence whose results are compared."""
MASKS = {"all": False, "causal": True}
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


def inputs(length: int, heads: int, head_dim: int, tokens: int, device: str) -> list[Tensor]:
    """Return q, k, v and the gradient of the result, [B, S, H, D] each, of at least `tokens` in all."""
    count = max(1, tokens // length)
    torch.manual_seed(0)
    return [
        torch.randn(count, length, heads, head_dim, device=device, dtype=torch.bfloat16)
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


def measure(
    compute: Callable[..., Tensor], tensors: list[Tensor]
) -> tuple[float, float, float | None]:
    """Return milliseconds of the forward and of the backward, and the peak of memory in MiB (None on a CPU)."""
    *leaves, dout = tensors
    leaves = [it.detach().requires_grad_() for it in leaves]

    def both() -> tuple[Tensor, ...]:
        out = compute(*leaves)
        return (out, *torch.autograd.grad(out, leaves, dout))

    peak = peak_mib(both, dout.device)
    with torch.no_grad():
        forward = _milliseconds(lambda: compute(*leaves), dout.device)
    out = compute(*leaves)
    backward = _milliseconds(
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), dout.device
    )
    return forward, backward, peak


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Time a call; once, by the host's clock, in a dry run on the CPU."""
    if device.type == "cuda":
        return float(do_bench(call, warmup=20, rep=60))
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def compare(head_dim: int, causal: bool, device: str) -> None:
    """Compare results and gradients with those of PyTorch; raise where they differ."""
    *leaves, dout = inputs(COMPARED_TOKENS, 4, head_dim, COMPARED_TOKENS, device)
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
    tensors = inputs(length, 16, head_dim, TOKENS, "cuda")
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
            timed.append((times[1] if number else times[0], launch))
        timed.sort(key=lambda it: it[0])
        chosen[number] = timed[0][1]
        for milliseconds, launch in timed[:10]:
            print(f"D={head_dim} {name}: {milliseconds:.3f} ms {launch}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, then measure every combination and print one table."""
    options = _parse(arguments)
    masks = [MASKS[name] for name in options.masks]
    for head_dim, causal in itertools.product(options.head_dims, masks):
        compare(head_dim, causal, options.device)
    if options.tune:
        for head_dim in options.head_dims:
            tune(options.lengths[-1], head_dim)
        return
    print("TFLOP/s             D  length  mask    forward backward   both  peak MiB")
    rows: list[dict[str, Any]] = []
    for head_dim, length, causal in itertools.product(options.head_dims, options.lengths, masks):
        tensors = inputs(
            length, max(1, options.columns // head_dim), head_dim, options.tokens, options.device
        )
        contenders = {"tessera": ours(causal)}
        contenders |= {name: peer(_PEERS[name], causal) for name in options.peers}
        for name, compute in contenders.items():
            row = {"kernel": name, "head_dim": head_dim, "length": length, "causal": causal}
            rows.append(row | _result(name, compute, tensors, causal=causal))
            print(_line(rows[-1]), flush=True)
    write_report(
        "attention-training", rows, ("torch", "triton"), device=options.device, folder=options.out,
        revision=options.commit, echo=False,
    )  # fmt: skip


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 16384])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--peers", nargs="*", choices=_PEERS, default=list(_PEERS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a batch (%(default)s)")
    parser.add_argument(
        "--columns", type=int, default=COLUMNS, help="of all heads together (%(default)s)"
    )
    parser.add_argument("--tune", action="store_true", help="find the fastest tiles instead")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: dry run")
    add_bookkeeping(parser)
    return parser.parse_args(arguments)


def _result(
    name: str, compute: Callable[..., Tensor], tensors: list[Tensor], *, causal: bool
) -> dict[str, Any]:
    """Return the entries of a row: times, TFLOP/s and memory, or why there are none."""
    work = 4 * tensors[0].numel() * tensors[0].shape[1] / (2 if causal else 1)
    try:
        forward, backward, peak = measure(compute, tensors)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"out_of_memory": True}
    except RuntimeError as error:
        if name == "tessera":
            raise
        return {"unsupported": str(error).splitlines()[0][:160]}
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "peak_mib": peak,
        "forward": work / forward / 1e9,
        "backward": 2.5 * work / backward / 1e9,
        "both": 3.5 * work / (forward + backward) / 1e9,
    }


def _line(row: dict[str, Any]) -> str:
    line = f"{row['kernel']:16} {row['head_dim']:4} {row['length']:7}  "
    if row.get("out_of_memory"):
        return f"{line}does not fit in memory"
    if "unsupported" in row:
        return f"{line}{row['unsupported']}"
    line += "causal" if row["causal"] else "all   "
    peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:9.0f}"
    return f"{line} {row['forward']:8.0f} {row['backward']:8.0f} {row['both']:6.0f} {peak}"


if __name__ == "__main__":
    main()
