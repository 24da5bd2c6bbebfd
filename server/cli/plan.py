"""`tessera plan`: which attention kernels would run for a model on a GPU, here or elsewhere, and why.

Knows no service. Imports PyTorch, so `server.cli.commands` imports it for this command alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

import msgspec
import torch

from kernels import FP8, KernelError, detect
from kernels.arch import CATALOGUE
from kernels.explain.text import render
from model.checkpoint.config import ModelConfig
from model.checkpoint.hub import resolve
from model.device.dtypes import gpu_dtype, resolve_dtype, resolve_weight_dtype
from model.errors import ModelError
from model.network.decoder import DecoderLM
from server.engine.runner.model_plan import explain_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels import GPUArch
    from kernels.explain.plan import Explanation
    from server.cli.settings import Settings

_SETTINGS = (
    "--model, --revision, --device, --dtype, --quantization, --kv-cache-dtype and --block-size"
)


def read_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read this command's own flags.

    Args:
        arguments: after `tessera plan`.

    Returns:
        `arch`, a key of the catalogue or None, and `json`; the other arguments, which are settings.
    """
    parser = argparse.ArgumentParser(
        prog="tessera plan",
        description="Show which attention kernels run for a model on a GPU, how they are launched, and why.",
        epilog=f"The flags of `tessera serve` are taken too; {_SETTINGS} decide the plan.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--arch", choices=list(CATALOGUE), help="a known processor; default: what is found here"
    )
    parser.add_argument("--json", action="store_true", help="print what GET /plan answers")
    return parser.parse_known_args(arguments)


def plan(options: argparse.Namespace, settings: Settings) -> None:
    """Print the plan; exits with status 1 where there is none for this model.

    Args:
        options: from `read_options`.
        settings: of the service that is planned.
    """
    try:
        explanation = explain_settings(settings, _find_arch(options.arch, settings.device))
    except (ModelError, KernelError, _NoDeviceError) as error:
        print(f"tessera plan: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if options.json:
        text = msgspec.json.format(msgspec.json.encode(explanation), indent=2).decode()
    else:
        text = render(explanation, settings.model)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `tessera plan | head`; Python would try once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explain_settings(settings: Settings, arch: GPUArch) -> Explanation:
    """Explain the attention of a service with these settings on a processor.

    Raises:
        ModelError: the model is not there or not supported, or cannot be quantised so there.
        NoKernelError: no kernel takes its attention; lists every reason.
    """
    folder = resolve(settings.model, settings.revision, config_only=True)
    config = ModelConfig.from_folder(folder)
    dtype = _dtype(settings.dtype, config, arch)
    weight_dtype = resolve_weight_dtype(settings.quantization, dtype, arch)
    model = DecoderLM(config, dtype, "meta", weight_dtype)
    kv_dtype = FP8 if settings.kv_cache_dtype == "fp8" else None
    return explain_model(model, settings.block_size, arch, kv_dtype)


class _NoDeviceError(Exception):
    """The device that is asked for is not here; the text says how to plan for it all the same."""


def _find_arch(key: str | None, device: str) -> GPUArch:
    if key is not None:
        return CATALOGUE[key]
    if device == "cuda" and not torch.cuda.is_available():
        raise _NoDeviceError(
            "--device cuda: PyTorch sees no CUDA device here; --arch names a known one"
        )
    return detect("cpu" if device == "cpu" else None)


def _dtype(requested: str, config: ModelConfig, arch: GPUArch) -> torch.dtype:
    if arch.is_cpu:
        return resolve_dtype(requested, config, "cpu")
    if requested == "auto":
        return gpu_dtype(config, has_bfloat16=arch.has_bfloat16)
    dtype: torch.dtype = getattr(torch, requested)
    return dtype
