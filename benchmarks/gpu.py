"""Measures all GPU figures of docs/benchmarks.md: the engine on three shapes and the bundled model, and the service.

    python -m benchmarks.gpu [--out results/] [--only llama-3.2-1b http] [--commit abc1234]

It prints each command before running it. If a command fails, the others still run.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.report import RESULTS, add_bookkeeping, write_report
from benchmarks.service import service
from server.cli.bench.engine.options import SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGE_STEPS = "--max-num-batched-tokens=8192"
_USUAL = ("batch1", "decode64", "decode256", "mixed256", "ttft128", "ttft4096")


def _engine(
    model: str, *options: str, label: str = "", workloads: Sequence[str] = _USUAL
) -> list[str]:
    what = [f"--model={model}", f"--label={label or model}", *options]
    return ["--device=cuda", *what, "--workloads", *workloads]


ENGINE = {
    name: _engine(name, _LARGE_STEPS) for name in ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
}
ENGINE |= {
    f"{name}-fp8-kv": _engine(name, _LARGE_STEPS, "--kv-cache-dtype=fp8", label=f"{name}-fp8-kv")
    for name in tuple(ENGINE)
}
ENGINE["llama-3.1-8b-fp8-weights"] = _engine(
    "llama-3.1-8b", _LARGE_STEPS, "--quantization=fp8", label="llama-3.1-8b-fp8-weights"
)
ENGINE["bundled"] = _engine("bundled", workloads=["batch1", "decode8", "decode256", "ttft128"])
"""Options of `tessera bench engine`, by name of the measurement."""
HTTP = "http"

_SERVED = "qwen3-0.6b"
_SERVICE = ["--device=cuda", f"--model={SHAPES / _SERVED}", "--load-format=dummy"]
_WARM_STARTS = 3
_IDLE_SECONDS = 14.0
"""Seconds to wait after the service is ready, while it records its steps."""


def bench(kind: str, options: Sequence[str], folder: Path, commit: str | None) -> bool:
    """Run `tessera bench` and return whether it succeeded.

    Args:
        kind: "engine" or "serve".
        options: options of that command, except those for the result file.
        folder: folder of the result file.
        commit: commit of the code; None asks git.
    """
    told = [f"--json={folder}", *([f"--commit={commit}"] if commit else [])]
    print("$", shlex.join(["tessera", "bench", kind, *options]), flush=True)
    command = [sys.executable, "-m", "server.cli.main", "bench", kind, *options, *told]
    return subprocess.run(command, check=False).returncode == 0


def load(url: str) -> list[str]:
    """Return the options of `tessera bench serve` for 1, 64 and 256 streams."""
    return [
        f"--url={url}", f"--label={_SERVED}", "--concurrency", "1", "64", "256",
        "--input-len=256", "--output-len=256", "--processes=2",
    ]  # fmt: skip


def serve(folder: Path, commit: str | None) -> bool:
    """Time the start of the service, first without compiled kernels, then put load on the last one started.

    Returns:
        Whether all succeeded.
    """
    try:
        return _serve(folder, commit)
    except SystemExit as error:
        print(error, flush=True)
        return False


def _serve(folder: Path, commit: str | None) -> bool:
    rows: list[dict[str, Any]] = []

    def note(cache: str, seconds: float) -> None:
        row = {"model": _SERVED, "metric": "ready_s", "batch": 1, "cache": cache}
        rows.append(row | {"value": round(seconds, 2)})

    with (
        tempfile.TemporaryDirectory() as empty,
        service(_SERVICE, {"TRITON_CACHE_DIR": empty}) as (_, seconds),
    ):
        note("cold", seconds)
    good = False
    # This start, which is not measured, fills the default cache if it is empty.
    with service(_SERVICE):
        pass
    for number in range(_WARM_STARTS):
        with service(_SERVICE) as (url, seconds):
            note("warm", seconds)
            if number == _WARM_STARTS - 1:
                time.sleep(_IDLE_SECONDS)
                good = bench("serve", load(url), folder, commit)
    write_report("ready", rows, ("torch", "triton"), device="cuda", folder=folder, revision=commit)
    return good


def main() -> None:
    """Run the measurements; exit with status 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = (*ENGINE, HTTP)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
        help=f"one or more of {', '.join(names)}")  # fmt: skip
    add_bookkeeping(parser)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch found no usable GPU")
    folder = arguments.out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only:
        if name == HTTP:
            good = serve(folder, arguments.commit)
        else:
            good = bench("engine", ENGINE[name], folder, arguments.commit)
        if not good:
            failed.append(name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
