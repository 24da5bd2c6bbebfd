"""Decides in which dtype a model is served, and its KV cache kept.

Knows the processor's abilities and the model's size. The figures behind the rule are in
docs/decisions/0004-cpu-dtype.md.
"""

from __future__ import annotations

import logging
from typing import Final

import torch

from kernels import GPUArch
from kernels.linear.projection import objection
from model.checkpoint.config import DTYPES, ModelConfig
from model.errors import ModelError

KV_DTYPES: Final = ("auto", "fp8")
QUANTIZATIONS: Final = ("none", "fp8")

_logger = logging.getLogger(__name__)

# Above this a CPU step is bound by reading weights, and float32 would double the memory of a laptop.
_LARGE_PARAMETERS: Final = 200_000_000


def resolve_dtype(requested: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """Choose the dtype of weights and cache.

    "auto" on a CPU is float32, except for a bfloat16 checkpoint of over 2 * 10^8 parameters on a
    processor with bfloat16 instructions. On a GPU it is the checkpoint's own, with bfloat16 for
    float32 ones, and float16 where the GPU has no bfloat16.

    Args:
        requested: "auto", "float32", "bfloat16" or "float16"; an explicit one is taken as it is.
        config: whose dtype and size count.
        device: where the model will run.

    Raises:
        ModelError: `requested` is none of these.
    """
    device = torch.device(device)
    if requested != "auto":
        if requested not in DTYPES:
            raise ModelError(f"dtype {requested!r} is none of auto, {', '.join(DTYPES)}")
        if requested == "float16" and device.type == "cpu":
            _logger.warning(
                "float16 on a CPU is correct but slow: batches take 3 to 6 times as long as bfloat16"
            )
        if requested == "bfloat16" and device.type == "cuda" and not _gpu_has_bfloat16():
            _logger.warning("this GPU emulates bfloat16, which is slow: float16 is faster")
        return _torch_dtype(requested)
    if device.type == "cpu":
        large = config.num_parameters > _LARGE_PARAMETERS
        use_bfloat16 = config.dtype == "bfloat16" and large and _has_bfloat16_instructions()
        return torch.bfloat16 if use_bfloat16 else torch.float32
    return gpu_dtype(config, has_bfloat16=_gpu_has_bfloat16())


def resolve_kv_dtype(requested: str, dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype of the KV cache.

    Args:
        requested: "auto" for the model's own, or "fp8" for float8_e4m3fn with scales.
        dtype: of the model.

    Raises:
        ModelError: `requested` is neither.
    """
    if requested not in KV_DTYPES:
        raise ModelError(f"kv cache dtype {requested!r} is none of {', '.join(KV_DTYPES)}")
    return dtype if requested == "auto" else torch.float8_e4m3fn


def resolve_weight_dtype(requested: str, dtype: torch.dtype, arch: GPUArch) -> torch.dtype | None:
    """Choose the dtype of the layers' matrices where it is not the model's.

    Args:
        requested: "none", or "fp8" for float8_e4m3fn with a scale for each output.
        dtype: of the model.
        arch: of its processor.

    Returns:
        What `DecoderLM` takes.

    Raises:
        ModelError: `requested` is neither, or the processor cannot multiply by such matrices.
    """
    if requested not in QUANTIZATIONS:
        raise ModelError(f"quantization {requested!r} is none of {', '.join(QUANTIZATIONS)}")
    if requested == "none":
        return None
    if reason := objection(arch, dtype):
        raise ModelError(
            f"quantization fp8: weights in FP8 are for the layers that our GPU kernels compute, and {reason}; "
            "set quantization to none"
        )
    return torch.float8_e4m3fn


def gpu_dtype(config: ModelConfig, *, has_bfloat16: bool) -> torch.dtype:
    """Choose the dtype on a GPU, which need not be there: what "auto" means in `resolve_dtype`."""
    if config.dtype == "float16" or not has_bfloat16:
        return torch.float16
    return torch.bfloat16


def _torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _gpu_has_bfloat16() -> bool:
    # Unless told otherwise, PyTorch counts GPUs that only emulate it, such as Turing.
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _has_bfloat16_instructions() -> bool:
    # No public question for this exists in every supported version of torch.
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())  # noqa: SLF001
