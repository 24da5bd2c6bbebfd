"""The format of a service's weights on a processor."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, NamedTuple

from kernels.cpu.library import load
from kernels.weight_format import INT8_GROUPS, LIBRARY_GROUP, is_read_by_library
from model.checkpoint.dtypes import resolve_quantization
from model.device.quantizations import (
    is_for_library,
    loaded_format,
    product_formats,
    quantization_name,
)
from model.executors import cpu_library

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from kernels.weight_format import WeightFormat
    from model.checkpoint.config import ModelConfig
    from server.engine.core.messages import EngineConfig


class ResolvedQuantization(NamedTuple):
    """What the setting `quantization` means for a model on a processor.

    Attributes:
        format: of the weights; None for full numbers.
        is_in_library: whether the C library for CPUs computes whole steps of the model.
        has_products: whether it computes the products of a model that is computed layer by layer, in float32.
    """

    format: WeightFormat | None
    is_in_library: bool
    has_products: bool = False

    def loaded(self, model: ModelConfig) -> WeightFormat | None:
        """Return the format in which a model's matrices are loaded; None for full numbers."""
        return loaded_format(self.format, model.stored_format, in_library=self.is_in_library)


log = logging.getLogger("tessera.engine")


def resolved_quantization(
    config: EngineConfig, model: ModelConfig, arch: GPUArch
) -> ResolvedQuantization:
    """Resolve the setting for a model on a processor; see `resolve_quantization`."""

    def unsupported() -> tuple[str, ...]:
        return _unsupported_products(config, model)

    def unsupported_steps() -> tuple[str, ...]:
        in_fp8, num_ranks = config.kv_cache_dtype == "fp8", config.tensor_parallel
        return cpu_library.unsupported(model.network, fp8_cache=in_fp8, num_ranks=num_ranks)

    stored = model.weight_format
    found = resolve_quantization(config.quantization, arch, config.dtype, unsupported, stored)
    is_in_library = is_for_library(found, arch, config.dtype, unsupported_steps)
    if is_in_library or found is None or not arch.is_cpu:
        return ResolvedQuantization(found, is_in_library)
    plain = dataclasses.replace(found, ordered=False)
    reads = is_read_by_library(plain) and config.dtype == "auto" and not isinstance(load(), str)
    if not reads:
        log.warning(
            "every step converts the weights from %s, which is slow: --quantization int8 or int4 is faster, where a "
            "CPU supports it",
            quantization_name(found),
        )
    return ResolvedQuantization(found, is_in_library=False, has_products=reads)


def _unsupported_products(config: EngineConfig, model: ModelConfig) -> tuple[str, ...]:
    """List why the products of a model cannot have weights in int8 or int4 on this processor; empty if they can."""
    if model.network.modules is not None:
        return ("modules of transformers compute the model",)
    if config.tensor_parallel > 1:
        return (f"{config.tensor_parallel} ranks share the model: set --tensor-parallel 1",)
    if isinstance(reason := load(), str):
        if config.quantization == "auto":
            log.warning("the weights are not in int8, so steps take longer: %s", reason)
        return (reason,)
    if not product_formats(model.network, INT8_GROUPS, {}):
        return (f"no matrix has inputs that are a multiple of {LIBRARY_GROUP}",)
    return ()
