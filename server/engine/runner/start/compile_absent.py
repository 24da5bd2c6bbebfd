"""Compiles the kernels of a service for a GPU that this machine does not have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kernels import KernelError, select
from kernels.collective.communicator import AbsentRanks
from kernels.gpu.absent_gpu import AbsentGPUError, absent_gpu
from model.checkpoint.config import ModelConfig
from model.checkpoint.dtypes import resolve_dtype
from model.decoder import DecoderLM
from model.errors import ModelError
from model.executors.bound import deterministic_unsupported
from model.executors.layers.recurrent import state_kernels
from server.engine.core.start_checks import StartupError
from server.engine.runner.start.quantization import resolved_quantization
from server.engine.runner.start.runner_start import make_runner
from server.engine.runner.start.step_limits import step_limits
from server.engine.runner.start.warm_up import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.arch import GPUArch
    from server.engine.core.messages import EngineConfig
    from server.engine.runner.step.model_runner import ModelRunner


def compile_for(config: EngineConfig, arch: GPUArch, say: Callable[[str], None]) -> None:
    """Compile every kernel of an engine's warm-up, and those of deterministic requests, into Triton's cache.

    The model is built without weights, and its first steps are taken without computing anything.

    Args:
        config: of the engine; only the model's configuration is read, not its weights.
        arch: the GPU.
        say: reports the progress.

    Raises:
        StartupError: the model does not run on this GPU, or the compilers are missing.
    """
    try:
        model_config = ModelConfig.from_folder(Path(config.model_path)).within(config.max_model_len)
        with absent_gpu(arch) as device:
            resolved = resolved_quantization(config, model_config, arch)
            dtype = resolve_dtype(config.dtype, model_config, device)
            size = config.tensor_parallel
            model = DecoderLM(
                model_config,
                dtype,
                device,
                resolved.loaded(model_config),
                AbsentRanks(size, fuses_norm=True) if size > 1 else None,
            )
            model.optimize()
            model.unmeasured_kernels = config.unmeasured_kernels
            states = state_kernels(model.network, model.dtype_name, arch)
            limits = step_limits(
                config, model_config, arch, states.chunk, takes_drafts=states.several_queries
            )
            model.reserve_positions(limits.max_model_len)
            for deterministic in (False, True):
                runner = make_runner(model, config, num_blocks=1, deterministic=deterministic)
                kv_dtype = runner.kv_cache.kv_dtype
                if deterministic and deterministic_unsupported(
                    model, arch, config.block_size, kv_dtype
                ):
                    break
                _check_attention(runner, arch)
                warm_up(
                    runner,
                    limits,
                    _prefixed("deterministic requests: ", say) if deterministic else say,
                )
    except (AbsentGPUError, KernelError, ModelError) as error:
        raise StartupError(str(error)) from error
    except NotImplementedError as error:
        # PyTorch has no such function for tensors without data; its FP8 product, for example.
        raise StartupError(
            f"these steps cannot be taken without the GPU: {str(error).split(': ')[0]}"
        ) from error


def _prefixed(prefix: str, say: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: say(prefix + text)


def _check_attention(runner: ModelRunner, arch: GPUArch) -> None:
    specs = [select(problem, arch).spec for problem in runner.attention_problems()]
    names = sorted({spec.name for spec in specs if spec.launch is None})
    if names:
        raise StartupError(
            f"{arch} runs {', '.join(names)}, which reads the lengths of sequences on the host, so its steps cannot be "
            "taken without the GPU"
        )
