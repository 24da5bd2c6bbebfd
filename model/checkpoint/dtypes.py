"""Selects the dtypes of a served model: weights and activations, and KV cache; and the format of its matrices.

docs/decisions/0004-cpu-dtype.md has the measurements for the choice on a CPU. PyTorch is imported by the functions that
return its dtypes, because `tessera size` does without it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kernels.arch import GPUArch, detect
from kernels.selection import VectorProblem, triton_unsupported
from model.checkpoint.config import DTYPES, ModelConfig
from model.checkpoint.cpu_dtype import arm_has_bfloat16, prefers_bfloat16_on_cpu
from model.device.quantizations import CPU_QUANTIZATIONS, QUANTIZATIONS
from model.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kernels.weight_format import WeightFormat

KV_DTYPES: Final = ("auto", "fp8")

_logger = logging.getLogger(__name__)


def resolve_dtype(requested: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """Select the dtype of weights and activations.

    "auto" on a CPU is float32, except for a bfloat16 checkpoint of over 2 * 10^8 parameters on a processor with
    bfloat16 instructions. On a GPU it is the checkpoint's dtype, except that a float32 checkpoint becomes bfloat16, and
    bfloat16 becomes float16 on a GPU without bfloat16.

    Args:
        requested: "auto", "float32", "bfloat16" or "float16"; any value but "auto" is used unchanged.
        config: the model's configuration; its dtype and number of parameters matter.
        device: device that the model runs on.

    Raises:
        ModelError: `requested` is none of these.
    """
    import torch  # noqa: PLC0415 - see the module's docstring

    device = torch.device(device)
    if requested != "auto":
        if requested not in DTYPES:
            raise ModelError(f"dtype {requested!r} is none of auto, {', '.join(DTYPES)}")
        if requested == "float16" and device.type == "cpu":
            _logger.warning(
                "float16 on a CPU is correct but slow: batches take 3 to 6 times as long as bfloat16"
            )
        if requested == "bfloat16" and device.type == "cuda" and not detect(device).has_bfloat16:
            _logger.warning("this GPU emulates bfloat16, which is slow: float16 is faster")
        dtype: torch.dtype = getattr(torch, requested)
        return dtype
    if device.type == "cpu":
        has_bfloat16 = has_bfloat16_instructions() or arm_has_bfloat16()
        use_bfloat16 = prefers_bfloat16_on_cpu(config) and has_bfloat16
        return torch.bfloat16 if use_bfloat16 else torch.float32
    return gpu_dtype(config, has_bfloat16=detect(device).has_bfloat16)


def resolve_kv_dtype(requested: str, dtype: torch.dtype) -> torch.dtype:
    """Select the dtype of the KV cache.

    Args:
        requested: "auto" for the model's dtype, or "fp8" for float8_e4m3fn with scales.
        dtype: dtype of the model.

    Raises:
        ModelError: `requested` is neither.
    """
    if requested not in KV_DTYPES:
        raise ModelError(f"kv cache dtype {requested!r} is none of {', '.join(KV_DTYPES)}")
    import torch  # noqa: PLC0415 - as above

    return dtype if requested == "auto" else torch.float8_e4m3fn


def resolve_quantization(
    requested: str,
    arch: GPUArch,
    dtype: str,
    unsupported_on_cpu: Callable[[], tuple[str, ...]],
    stored: WeightFormat | None = None,
) -> WeightFormat | None:
    """Select the format of the weights.

    "auto" and "none" serve a checkpoint in the format that it has. "auto" is "int8" for others, on a CPU that can serve
    the model so. A requested dtype is that of weights, activations and KV cache, which "int8" and "int4" determine
    themselves; so "auto" with one is "none".

    Args:
        requested: the setting.
        arch: the processor.
        dtype: of the model, as requested.
        unsupported_on_cpu: lists why this CPU cannot serve the model with "int8" and "int4".
        stored: the format of the checkpoint that a model can hold; None for full numbers.

    Returns:
        The format of the layers' matrices, and of the embedding and the head too if it is one of `LIBRARY_FORMATS`;
        None for full numbers.

    Raises:
        ModelError: `requested` is no setting, or the processor, the checkpoint or `dtype` does not allow it; names
            every reason.
    """
    if requested in ("auto", "none"):
        is_exact = requested == "none" or stored is not None or not arch.is_cpu or dtype != "auto"
        return stored if is_exact or unsupported_on_cpu() else QUANTIZATIONS["int8"]
    if requested not in QUANTIZATIONS:
        settings = ", ".join(("auto", "none", *QUANTIZATIONS))
        raise ModelError(f"quantization {requested!r} is none of {settings}")
    if requested in CPU_QUANTIZATIONS:
        _check_integers(requested, arch, dtype, unsupported_on_cpu)
    else:
        _check_float8(arch, stored)
    return QUANTIZATIONS[requested]


def _check_float8(arch: GPUArch, stored: WeightFormat | None) -> None:
    if stored is not None and stored != QUANTIZATIONS["fp8"]:
        raise ModelError(
            f"quantization fp8: the checkpoint's weights are quantized already, as {stored.name}, and would be rounded "
            "twice; set quantization to none or auto to serve them as they are"
        )
    if reasons := triton_unsupported(VectorProblem("bfloat16"), arch):
        raise ModelError(
            f"quantization fp8: weights in FP8 are for our GPU kernels, and this processor has none: {reasons[0]}; "
            f"set quantization to {'int8, int4, auto or none' if arch.is_cpu else 'none'}"
        )


def _check_integers(
    requested: str, arch: GPUArch, dtype: str, unsupported_on_cpu: Callable[[], tuple[str, ...]]
) -> None:
    if not arch.is_cpu:
        raise ModelError(
            f"quantization {requested}: weights in int8 and int4 are for a CPU, and {arch.name} is a GPU; "
            "set quantization to fp8, none or auto"
        )
    reasons = unsupported_on_cpu()
    if dtype != "auto":
        reasons = (f"it determines the dtypes, so set dtype to auto, not {dtype}", *reasons)
    if reasons:
        raise ModelError(
            f"quantization {requested} is not supported here: {'; '.join(reasons)}; "
            "set quantization to none or auto to serve the model without it"
        )


def stored_dtype(config: ModelConfig) -> torch.dtype:
    """Return the dtype of a checkpoint's weights, for weights that are quantized as they are stored."""
    import torch  # noqa: PLC0415 - as above

    dtype: torch.dtype = getattr(torch, config.dtype if config.dtype in DTYPES else "float32")
    return dtype


def gpu_dtype(config: ModelConfig, *, has_bfloat16: bool) -> torch.dtype:
    """Select the dtype for "auto" on a GPU; the GPU need not be present on this machine."""
    import torch  # noqa: PLC0415 - as above

    dtype: torch.dtype = getattr(torch, gpu_dtype_name(config, has_bfloat16=has_bfloat16))
    return dtype


def gpu_dtype_name(config: ModelConfig, *, has_bfloat16: bool) -> str:
    """Return the name of `gpu_dtype`."""
    return "float16" if config.dtype == "float16" or not has_bfloat16 else "bfloat16"


def has_bfloat16_instructions() -> bool:
    """Whether the CPU is an x86 with instructions for bfloat16."""
    from kernels import torch_private  # noqa: PLC0415 - as above

    return torch_private.has_bfloat16_instructions()
