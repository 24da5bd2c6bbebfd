"""Allocates the KV cache of a loaded model and warms up, in an order that depends on the device.

    CPU    allocate the cache (the system assigns memory at the first use), then warm up
    GPU    warm up with a cache of one block and measure the memory of the largest step; allocate the cache in the
           remaining free memory; compute the largest step again, so that PyTorch keeps the measured memory

Other processes may start on the same GPU at the same time, so free memory may be gone a moment after it was measured.
The start therefore succeeds only once both the cache and the largest step's memory are allocated.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Final

import torch

from kernels import detect, select
from model.checkpoint.dtypes import resolve_kv_dtype
from model.device.kv_cache import KVCache
from model.device.memory import gpu_use, peak_memory, release_cached
from model.device.replay import CudaGraphs
from server.engine.core.memory.kv_demand import Allowance, NotEnoughMemoryError
from server.engine.runner.start.kv_memory import allocate_kv_cache
from server.engine.runner.start.kv_sizes import GPU_HEADROOM_BYTES, kv_cache_demand
from server.engine.runner.start.warm_up import check_scores, compute_largest_step, warm_up
from server.engine.runner.step.buckets import recorded_bytes
from server.engine.runner.step.grammars import Grammars
from server.engine.runner.step.model_runner import ModelRunner
from server.engine.runner.step.ranks import FollowingExecutor, LeadingExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from model.decoder import DecoderLM
    from model.network.state import StateSpec
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.messages import EngineConfig
    from server.engine.runner.start.startup_progress import Phases
    from server.engine.runner.step.rank_adapters import FollowingLoader
    from server.engine.runner.step.ranks import Ranks

log = logging.getLogger("tessera.engine")

_FEWEST_TOKENS: Final = 2


def start_runner(
    model: DecoderLM,
    config: EngineConfig,
    limits: SchedulerConfig,
    phases: Phases,
    ranks: Ranks | None = None,
) -> tuple[ModelRunner, int]:
    """Allocate the KV cache, warm up and record steps from now on.

    Args:
        model: on its device.
        config: of the engine.
        limits: of a step.
        phases: reports the progress.
        ranks: the other ranks if the model is shared.

    Returns:
        The runner, and the limit of tokens in one sequence.

    Raises:
        NotEnoughMemoryError: the cache does not fit, or a cache that fits cannot hold a prompt and an output token.
        StartupError: the model computes no finite numbers.
    """
    runner = _start(model, config, limits, phases)
    if ranks is not None:
        runner.executor = LeadingExecutor(model, runner.kv_cache, ranks)
    max_total_tokens = _max_total_tokens(runner, limits)
    _log_capacity(runner, limits, max_total_tokens)
    if _records(config, runner):
        served = dataclasses.replace(limits, max_model_len=max_total_tokens)
        runner.record_steps(served, CudaGraphs(runner.device), phases.recorded)
    return runner, max_total_tokens


def start_follower(
    model: DecoderLM,
    config: EngineConfig,
    limits: SchedulerConfig,
    phases: Phases,
    adapters: FollowingLoader | None = None,
) -> FollowingExecutor:
    """Do what `start_runner` does, on a rank that does not lead.

    Args:
        model: this rank's part, on its device.
        config: of the engine.
        limits: of a step.
        phases: reports the progress.
        adapters: of its slots; None if it has none.

    Raises:
        NotEnoughMemoryError: as for `start_runner`.
    """
    runner = _start(model, config, limits, phases)
    recorder = CudaGraphs(runner.device) if _records(config, runner) else None
    return FollowingExecutor(model, runner.kv_cache, recorder, limits.max_logits, adapters)


def _start(
    model: DecoderLM, config: EngineConfig, limits: SchedulerConfig, phases: Phases
) -> ModelRunner:
    """Allocate the KV cache and warm up. Ranks do so at their own pace, and then agree on the size of the cache."""
    on_gpu = model.device.type == "cuda"
    start = _start_on_gpu if on_gpu else _start_on_cpu
    communicator = model.communicator
    if communicator is None:
        return start(model, config, limits, phases)
    with communicator.detached():
        runner = start(model, config, limits, phases)
    runner.num_blocks = communicator.minimum(runner.num_blocks)
    return runner


def _start_on_cpu(
    model: DecoderLM, config: EngineConfig, limits: SchedulerConfig, phases: Phases
) -> ModelRunner:
    with phases("allocating the KV cache"):
        model.reserve_positions(limits.max_model_len)
        runner = _allocate(model, config, limits)
        served = dataclasses.replace(limits, max_model_len=_max_total_tokens(runner, limits))
    with phases("warming up"):
        warm_up(runner, served, phases.say)
        check_scores(runner)
    return runner


def _start_on_gpu(
    model: DecoderLM, config: EngineConfig, limits: SchedulerConfig, phases: Phases
) -> ModelRunner:
    device = model.device
    with phases("warming up"):
        model.reserve_positions(limits.max_model_len)
        with peak_memory(device) as peak_bytes:
            runner = make_runner(model, config, num_blocks=1, most_logits=limits.max_logits)
            warm_up(runner, limits, phases.say)
            check_scores(runner)
            step_bytes = peak_bytes()
        del runner
        release_cached(device)
        recorded = _recorded_bytes(model, config, limits)
        log.info(
            "the largest step needs %.2f GiB of activations, recorded steps %.2f GiB",
            step_bytes / 2**30,
            recorded / 2**30,
        )
    with phases("allocating the KV cache"):

        def hold_step(runner: ModelRunner) -> None:
            compute_largest_step(runner, limits)
            torch.cuda.synchronize(device)

        kept_bytes = step_bytes + recorded + GPU_HEADROOM_BYTES
        return _allocate(model, config, limits, kept_bytes, hold_step)


def _records(config: EngineConfig, runner: ModelRunner) -> bool:
    """Return whether steps are recorded."""
    return config.cuda_graphs and runner.device.type == "cuda" and _can_record(runner)


def _recorded_bytes(model: DecoderLM, config: EngineConfig, limits: SchedulerConfig) -> int:
    """Return the memory of the inputs and results of recorded steps; 0 if steps are not recorded."""
    if not config.cuda_graphs or model.network.modules is not None:
        return 0
    row_bytes = model.network.vocab * model.dtype.itemsize
    return recorded_bytes(limits, config.block_size, row_bytes)


def _can_record(runner: ModelRunner) -> bool:
    """Return whether the attention of a step runs on the GPU alone; logs what does not.

    PyTorch's attention, the fallback for other GPUs and dtypes, reads its batch on the host.
    """
    if runner.model.network.modules is not None:
        log.info("steps are not recorded: modules of transformers may read values of the device")
        return False
    arch = detect(runner.model.device)
    specs = [select(problem, arch).spec for problem in runner.attention_problems()]
    names = {spec.name for spec in specs if spec.launch is None}
    if names:
        log.warning(
            "steps are not recorded: %s reads the batch on the host", ", ".join(sorted(names))
        )
    return not names


def _allocate(
    model: DecoderLM,
    config: EngineConfig,
    limits: SchedulerConfig,
    kept_bytes: int = 0,
    hold_step: Callable[[ModelRunner], None] | None = None,
) -> ModelRunner:
    """Allocate a cache of the size that the memory allows or the operator set.

    Args:
        model: on its device.
        config: of the engine.
        limits: of a step.
        kept_bytes: bytes that stay free for a step's activations.
        hold_step: allocates those bytes after the cache; if it fails, a smaller cache is tried.
    """

    def allocate(num_blocks: int, num_slots: int) -> ModelRunner:
        runner = make_runner(model, config, num_blocks, num_slots, most_logits=limits.max_logits)
        if hold_step is not None:
            hold_step(runner)
        return runner

    device = model.device
    state, allowance = _state(model, config), _allowance(config, device)
    demand = kv_cache_demand(config, limits, state, kept_bytes, allowance)
    num_processes = config.num_engines * config.tensor_parallel
    return allocate_kv_cache(demand, device, allocate, num_processes)


def _allowance(config: EngineConfig, device: torch.device) -> Allowance | None:
    """Return what the engine may use of the GPU, of which it has the weights; None if that is not set."""
    share = config.gpu_memory_utilization
    if share is None:
        return None
    if device.type == "cpu":
        log.info("--gpu-memory-utilization %g has no effect: the model runs on the CPU", share)
        return None
    return Allowance(share, *gpu_use(device))


def make_runner(
    model: DecoderLM,
    config: EngineConfig,
    num_blocks: int,
    num_slots: int = 1,
    *,
    most_logits: int = 1,
    deterministic: bool | None = None,
) -> ModelRunner:
    """Return a runner of a model with a new KV cache.

    Args:
        model: on its device.
        config: of the engine.
        num_blocks: of the cache.
        num_slots: of the cache, if layers have a state of fixed size.
        most_logits: rows of logits of a step, each of which may have a mask.
        deterministic: as for `ModelRunner`; None for the configuration's.
    """
    device = model.device
    return ModelRunner(
        model,
        KVCache(_state(model, config), num_blocks, config.block_size, device, num_slots),
        Grammars(config.model_path, model.config, device, 2 * most_logits),
        deterministic=config.deterministic if deterministic is None else deterministic,
    )


def _state(model: DecoderLM, config: EngineConfig) -> StateSpec:
    """Return what a sequence keeps on the device."""
    return model.network.state(resolve_kv_dtype(config.kv_cache_dtype, model.cache_dtype))


def _max_total_tokens(runner: ModelRunner, limits: SchedulerConfig) -> int:
    """Return the limit of tokens in one sequence: that of a step's limits or the capacity of the cache."""
    tokens = min(limits.max_model_len, runner.num_cache_tokens)
    if tokens < _FEWEST_TOKENS:
        raise NotEnoughMemoryError(
            f"a KV cache of {tokens} token cannot hold a prompt and an answer; "
            f"--kv-cache-tokens must be at least {_FEWEST_TOKENS}"
        )
    return tokens


def _log_capacity(runner: ModelRunner, limits: SchedulerConfig, tokens: int) -> None:
    """Log how many sequences the cache holds; `tokens` is the limit of one sequence."""
    if tokens < limits.max_model_len:
        log.warning(
            "the KV cache limits a request to %d tokens, prompt and output together; the model allows %d; "
            "--kv-cache-tokens, --kv-cache-gib and --gpu-memory-utilization set the size of the cache",
            tokens,
            limits.max_model_len,
        )
    else:
        log.info(
            "the KV cache holds %d tokens, %d sequences of %d tokens at once",
            runner.num_cache_tokens,
            runner.num_cache_tokens // limits.max_model_len,
            limits.max_model_len,
        )
