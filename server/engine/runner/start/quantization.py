"""The format of a service's weights on a processor."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from kernels.cpu.library import load
from model.checkpoint.dtypes import resolve_quantization
from model.device.quantizations import is_for_library, quantization_name
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
        is_in_library: whether the C library for CPUs computes the model.
    """

    format: WeightFormat | None
    is_in_library: bool


log = logging.getLogger("tessera.engine")


def resolved_quantization(
    config: EngineConfig, model: ModelConfig, arch: GPUArch
) -> ResolvedQuantization:
    """Resolve the setting for a model on a processor; see `resolve_quantization`."""

    def unsupported() -> tuple[str, ...]:
        in_fp8, num_ranks = config.kv_cache_dtype == "fp8", config.tensor_parallel
        reasons = cpu_library.unsupported(model.network, fp8_cache=in_fp8, num_ranks=num_ranks)
        if config.quantization == "auto" and reasons == (load(),):
            log.warning("the weights are not in int8, so steps take longer: %s", reasons[0])
        return reasons

    stored = model.weight_format
    found = resolve_quantization(config.quantization, arch, config.dtype, unsupported, stored)
    is_in_library = is_for_library(found, arch, config.dtype, unsupported)
    if arch.is_cpu and found is not None and not is_in_library:
        log.warning(
            "every step converts the weights from %s, which is slow: --quantization int8 or int4 is faster, where a "
            "CPU supports it",
            quantization_name(found),
        )
    return ResolvedQuantization(found, is_in_library)
