"""Checks of an engine's configuration that need neither PyTorch nor the weights.

The command line calls them before anything is loaded, and the engine again once PyTorch tells whether there is a GPU,
so that the same mistake has the same message.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from model.adapters.targets import find_targets
from model.checkpoint.cpu_dtype import prefers_bfloat16_on_cpu
from model.device.host_memory import total_host_bytes
from model.device.quantizations import CPU_QUANTIZATIONS
from model.errors import AdapterError
from model.families.unlisted import NAME
from model.network.state import quantized_kv_dtype
from server.engine.core.memory.kv_demand import (
    GIB,
    KVCacheDemand,
    NotEnoughMemoryError,
    requested_size,
)

if TYPE_CHECKING:
    from model.checkpoint.config import ModelConfig
    from server.engine.core.messages import EngineConfig

NO_GPU = "--device cuda: there is no CUDA device that PyTorch could use"


class StartupError(Exception):
    """The engine cannot start for a reason that the operator can fix; the text states it.

    Example:
        >>> async def main() -> None:
        ...     try:
        ...         async with embedded_service(Settings(device="cpu", max_model_len=1_000_000)):
        ...             pass
        ...     except StartupError as error:
        ...         print("max-model-len" in str(error))
        >>> asyncio.run(main())
        True
    """


def check_start(config: EngineConfig, model: ModelConfig, *, has_gpu: bool | None) -> None:
    """Check the parts of the configuration that depend on the model and the machine.

    Args:
        config: of the engine.
        model: configuration of the checkpoint.
        has_gpu: whether this machine has a GPU; None if that is not known, which skips some checks.

    Raises:
        StartupError: an engine with this configuration cannot start.
    """
    if config.device == "cuda" and has_gpu is False:
        raise StartupError(
            f"{NO_GPU}; use --device cpu or auto (a container sees a GPU with `docker run --gpus all`)"
        )
    requested, limit = config.max_model_len, model.max_context
    if requested is not None and requested > limit:
        raise StartupError(
            f"--max-model-len {requested} is more than the model's own limit of {limit} tokens"
        )
    if model.network.modules is not None:
        check_with_modules(config)
    if config.max_loras:
        try:
            find_targets(model)
        except AdapterError as error:
            raise StartupError(f"--max-loras {config.max_loras}: {error}") from None
    if reasons := model.parallel_unsupported(config.tensor_parallel):
        raise StartupError(f"--tensor-parallel {config.tensor_parallel}: {'; '.join(reasons)}")
    folder = config.compiled_kernels
    if folder is not None and not Path(folder).is_dir():
        raise StartupError(
            f"--compiled-kernels {folder}: there is no such folder; `tessera warmup --arch` with --output makes one"
        )
    if config.device == "cpu" or has_gpu is False:
        _check_on_cpu(config, model)
    elif (config.device == "cuda" or has_gpu) and config.quantization in CPU_QUANTIZATIONS:
        raise StartupError(
            f"--quantization {config.quantization}: weights in int8 and int4 need --device cpu; on a GPU use "
            "--quantization fp8, none or auto"
        )


def check_with_modules(config: EngineConfig) -> None:
    """Check the settings of an engine whose network has modules of `transformers`.

    Raises:
        StartupError: the library is not installed, or a setting is not supported with it.
    """
    if find_spec("transformers") is None:
        raise StartupError(
            f"{NAME} needs the packages of the extra `transformers`: pip install 'tessera[transformers]'"
        )
    wrong = {
        f"--tensor-parallel {config.tensor_parallel}": config.tensor_parallel > 1,
        f"--quantization {config.quantization}": config.quantization not in ("auto", "none"),
        "--deterministic": config.deterministic,
        f"--load-format {config.load_format}": config.load_format == "pickle",
    }
    if names := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise StartupError(f"{', '.join(names)}: not supported with {NAME}")


def _check_on_cpu(config: EngineConfig, model: ModelConfig) -> None:
    if config.tensor_parallel > 1 and config.quantization in CPU_QUANTIZATIONS:
        raise StartupError(
            f"--quantization {config.quantization}: the library for weights in int8 and int4 does not share a model "
            f"among --tensor-parallel {config.tensor_parallel} ranks; use none or auto"
        )
    if config.quantization == "fp8":
        raise StartupError(
            "--quantization fp8: weights in FP8 are for our GPU kernels, and this service runs on the CPU; "
            "use --quantization int8, int4, none or auto"
        )
    if config.kv_cache_tokens is None and config.kv_cache_gib is None:
        return
    if not model.network.layers:
        return  # those of modules are not known before the engine has built them
    demand = KVCacheDemand(
        requested_tokens=config.kv_cache_tokens,
        requested_gib=config.kv_cache_gib,
        useful_tokens=1,
        block_size=config.block_size,
        bytes_per_token=model.network.state(_cache_dtype(config, model)).token_bytes,
    )
    # All memory, not what is free now: another process, such as this service's predecessor, may be about to end.
    total = total_host_bytes()
    stated = f"{total / GIB:.2f} GiB of memory on cpu"
    if config.num_engines > 1:
        stated += f" for {config.num_engines} engines (--data-parallel)"
    try:
        requested_size(demand, total // config.num_engines, stated)
    except NotEnoughMemoryError as error:
        raise StartupError(str(error)) from None


def _cache_dtype(config: EngineConfig, model: ModelConfig) -> str:
    """Return the dtype of the KV cache on a CPU, the smallest if that depends on the processor.

    With weights in int8 and int4 the cache is in float16. "auto" is int8 on most processors.
    """
    if (quantized := quantized_kv_dtype(config.kv_cache_dtype)) is not None:
        return quantized
    if config.dtype != "auto":
        return config.dtype
    may_be_integers = config.quantization != "none" and config.tensor_parallel == 1
    return "float16" if may_be_integers or prefers_bfloat16_on_cpu(model) else "float32"
