"""The model that a service would run for some settings on a processor that may be absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels import GPUArch
from kernels.collective.communicator import AbsentRanks
from kernels.weight_format import LIBRARY_FORMATS
from model.checkpoint.config import ModelConfig
from model.checkpoint.dtypes import gpu_dtype, resolve_dtype
from model.decoder import DecoderLM
from model.device.quantizations import product_formats
from model.errors import UnsupportedModelError
from model.modules import plan_modules
from model.network.state import quantized_kv_dtype
from server.cli.command_settings import engine_config
from server.engine.core.start_checks import check_with_modules
from server.engine.runner.start.quantization import resolved_quantization

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.weight_format import WeightFormat
    from server.cli.settings import Settings


class PlannedModel(NamedTuple):
    """A model as a processor would run it.

    Attributes:
        model: without weights, on the device "meta"; that of one rank.
        quantization: of the weights, resolved; None for full numbers.
        kv_dtype: of a quantized KV cache; None if the cache has the model's dtype.
    """

    model: DecoderLM
    quantization: WeightFormat | None
    kv_dtype: str | None


def resolve_model(settings: Settings, folder: Path, arch: GPUArch) -> PlannedModel:
    """Resolve the model of a service with these settings on a processor.

    Args:
        settings: of the service.
        folder: of the model's configuration.
        arch: the processor; it need not be present.

    Raises:
        ModelError: the model is not supported, or the processor does not support the quantization.
        StartupError: as for `check_with_modules`.
    """
    config = ModelConfig.from_folder(folder, settings.model_backend).within(settings.max_model_len)
    if config.network.modules is not None:
        check_with_modules(engine_config(settings, folder))
        dtype = _dtype(settings.dtype, config, arch)
        planned = plan_modules(folder, config, dtype)
        return PlannedModel(planned, None, quantized_kv_dtype(settings.kv_cache_dtype))
    num_ranks = settings.tensor_parallel
    if reasons := config.parallel_unsupported(num_ranks):
        raise UnsupportedModelError(f"--tensor-parallel {num_ranks}: {'; '.join(reasons)}")
    resolved = resolved_quantization(engine_config(settings, folder), config, arch)
    quantization, in_library, has_products = resolved
    formats: WeightFormat | dict[str, WeightFormat] | None = resolved.loaded(config)
    if has_products and quantization in LIBRARY_FORMATS:
        assert quantization is not None
        formats = product_formats(config.network, quantization, {})
    model = DecoderLM(
        config,
        torch.float32 if has_products else _dtype(settings.dtype, config, arch),
        "meta",
        formats,
        AbsentRanks(num_ranks) if num_ranks > 1 else None,
    )
    model.unmeasured_kernels = settings.unmeasured_kernels
    model.rounds_inputs = has_products
    if in_library:
        assert quantization is not None
        model.assign_to_library(quantization)
    return PlannedModel(model, quantization, quantized_kv_dtype(settings.kv_cache_dtype))


def _dtype(requested: str, config: ModelConfig, arch: GPUArch) -> torch.dtype:
    if arch.is_cpu:
        return resolve_dtype(requested, config, "cpu")
    if requested == "auto":
        return gpu_dtype(config, has_bfloat16=arch.has_bfloat16)
    dtype: torch.dtype = getattr(torch, requested)
    return dtype
