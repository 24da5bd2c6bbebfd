"""Builds an engine from its configuration, and reports each phase to the front end and the log."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import math
import os
import platform
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from kernels import KernelError, detect
from kernels.collective.connect import connect
from kernels.cpu.library import instructions
from kernels.cpu.workers import set_num_threads
from model.checkpoint.config import ModelConfig
from model.checkpoint.dtypes import resolve_dtype, stored_dtype
from model.checkpoint.weights import LoadProgress, load_part
from model.device.cpus import default_engine_threads, usable_cpus
from model.device.memory import free_bytes
from model.device.quantizations import quantization_name
from model.errors import ModelError
from model.executors.layers.recurrent import state_kernels
from model.executors.single_launch import exact_rows
from model.modules import load_modules, with_modules
from model.network.matrix_shapes import slot_bytes
from model.network.parallel import shard_network
from model.network.state import quantized_kv_dtype
from model.progress import Progress, bytes_text
from server.engine.core.adapter_pool import AdapterPool
from server.engine.core.engine import Engine
from server.engine.core.memory.block_manager import BlockManager
from server.engine.core.memory.kv_demand import NotEnoughMemoryError
from server.engine.core.messages import EngineConfig, EngineInfo
from server.engine.core.schedule.scheduler import Scheduler
from server.engine.core.start_checks import StartupError, check_start
from server.engine.runner.explain.model_plan import check_deterministic
from server.engine.runner.start.device_errors import explain
from server.engine.runner.start.quantization import resolved_quantization
from server.engine.runner.start.runner_start import start_follower, start_runner
from server.engine.runner.start.startup_progress import Phases
from server.engine.runner.start.step_limits import step_limits
from server.engine.runner.step.adapters import SlotLoader
from server.engine.runner.step.rank_adapters import FollowingLoader, LeadingLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kernels.collective.endpoint import RankEndpoint
    from kernels.weight_format import WeightFormat
    from model.decoder import DecoderLM
    from server.engine.core.engine import EngineChannel
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.messages import EngineMessage, FrontEndMessage
    from server.engine.core.plan_report import PlanReport
    from server.engine.runner.step.model_runner import ModelRunner
    from server.engine.runner.step.rank_adapters import AdapterReport
    from server.engine.runner.step.ranks import FollowingExecutor, Ranks

log = logging.getLogger("tessera.engine")


# Share of the blocks kept empty, so that sequences get adjacent blocks: the CPU's attention reads a run of them in one
# call. With 0.2 a sequence has 2.2 runs, with 0 it has 35 (64 sequences, twice as many blocks as they need, prefix
# caching on). The drawback is that cached blocks are evicted earlier.
_CPU_CONTIGUITY_RESERVE = 0.2


class _Loaded(NamedTuple):
    """A model on its device, and what was decided while it was loaded."""

    model: DecoderLM
    config: ModelConfig
    limits: SchedulerConfig
    quantization: WeightFormat | None


def start_engine(
    config: EngineConfig, channel: EngineChannel, ranks: Ranks | None = None
) -> Engine:
    """Load the model, allocate its KV cache and warm up.

    Args:
        config: of the engine.
        channel: to the front end.
        ranks: the other ranks, which are started already; None if `tensor_parallel` is 1.

    Raises:
        StartupError: the configuration, the checkpoint or the machine does not allow it.
    """
    assert config.tensor_parallel == (ranks.size if ranks else 1)
    phases = Phases(channel)
    with _errors_explained(phases):
        loaded = _load(config, phases, None if ranks is None else ranks.endpoint)
        model, model_config, limits, quantization = loaded
        runner, max_total_tokens = start_runner(model, config, limits, phases, ranks)
    device = runner.device
    dtype = model.dtype
    num_blocks = runner.num_cache_tokens // config.block_size
    states = runner.state_kernels
    blocks = BlockManager(
        num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        contiguity_reserve=_CPU_CONTIGUITY_RESERVE if device.type == "cpu" else 0.0,
        num_slots=runner.kv_cache.num_slots,
        state_chunk=states.chunk,
        keeps_inside=states.keeps,
        repeats_output=device.type == "cpu",
    )
    if blocks.slots is not None:
        # States of layers that have chunks are too large to be kept more often, also where kernels need no chunks.
        if states.several_queries:
            blocks.slots.reserve_for_drafts(limits.max_queries - 1)
        blocks.slots.mark_unit = math.lcm(blocks.slots.unit, runner.kv_cache.spec.chunk)
    if config.state_snapshots is not None:
        _check_snapshots(config, runner)
    info = EngineInfo(
        model_id=config.model_id,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        quantization=quantization_name(quantization, model.weight_format, *model.other_formats),
        vocab_size=model_config.network.vocab,
        max_model_len=limits.max_model_len,
        max_total_tokens=max_total_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_prefill_tokens=limits.prefill_budget,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_cache_dtype=runner.cache_dtype,
        num_parameters=model_config.network.num_parameters,
        plan=_plan(runner, blocks, limits),
        startup_seconds=phases.seconds,
        versions=_versions(model),
        max_draft_tokens=config.max_draft_tokens,
        exact_rows=runner.exact_rows,
        engine=config.engine,
        pid=os.getpid(),
        max_loras=config.max_loras or 0,
        max_lora_rank=config.max_lora_rank if config.max_loras else 0,
    )
    log.info(
        "%s: %.1fM parameters in %s%s on %s, KV cache of %d tokens in %s",
        info.model_id,
        info.num_parameters / 1e6,
        info.dtype,
        "" if info.quantization == "none" else f" (layers in {info.quantization})",
        info.device,
        runner.num_cache_tokens,
        info.kv_cache_dtype,
    )
    log.info("%s; GET /plan lists the reasons", info.plan)
    runs_ahead = config.overlap and device.type == "cuda"
    scheduler = Scheduler(limits, blocks, pads_drafts=runner.recorded is not None)
    if blocks.slots is not None:
        scheduler.drafts.most_in_step = blocks.slots.num_for_drafts
    scheduler.drafts.has_exact_rows = lambda: runner.exact_rows > 1
    adapters = None
    if config.max_loras:
        part = SlotLoader(model, config.max_lora_rank)
        loader = part if ranks is None else LeadingLoader(part, ranks)
        adapters = AdapterPool(config.max_loras, config.num_host_adapters, loader)
    return Engine(scheduler, runner, channel, info, runs_ahead=runs_ahead, adapters=adapters)


def _plan(runner: ModelRunner, blocks: BlockManager, limits: SchedulerConfig) -> PlanReport:
    """Return the plan of an engine, with what its cache has."""
    plan, slots = runner.describe_plan(), blocks.slots
    if slots is None:
        return plan
    snapshots = slots.num_slots - slots.num_reserved - limits.max_num_seqs
    memory = msgspec.structs.replace(plan.memory, state_snapshots=snapshots)
    return msgspec.structs.replace(plan, memory=memory)


def _check_snapshots(config: EngineConfig, runner: ModelRunner) -> None:
    """Log why a number of snapshots that the operator set has no effect, if it has none."""
    why = "" if config.enable_prefix_caching else "prefixes are not cached"
    if not runner.kv_cache.num_slots:
        why = "no layer has a state of fixed size"
    if why:
        log.warning("--state-snapshots %d has no effect: %s", config.state_snapshots, why)


def _reserve_adapters(model: DecoderLM, config: EngineConfig) -> None:
    """Allocate the slots of adapters.

    Raises:
        StartupError: memory does not suffice.
    """
    assert config.max_loras
    dtype = torch.float32 if model.device.type == "cpu" else model.dtype
    num_bytes = config.max_loras * slot_bytes(model.network, config.max_lora_rank, dtype.itemsize)
    wanted = (
        f"{config.max_loras} slots for adapters of rank {config.max_lora_rank} need"
        f" {num_bytes / 2**30:.2f} GiB"
    )
    if num_bytes > (free := free_bytes(model.device)):
        raise StartupError(f"{wanted}; free are {free / 2**30:.2f} GiB: set --max-loras")
    log.info("%s", wanted)
    model.reserve_adapters(config.max_loras, config.max_lora_rank)


def _versions(model: DecoderLM) -> dict[str, str]:
    """Return the versions of the libraries that results depend on, and on a CPU the instruction set that they use."""
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if model.executors.cpu_library is not None:
        versions["instructions"] = instructions()
    elif model.device.type == "cpu":
        versions["instructions"] = str(torch.backends.cpu.get_cpu_capability())
    return versions


def start_rank(
    config: EngineConfig, endpoint: RankEndpoint, report: Callable[[AdapterReport], None]
) -> FollowingExecutor:
    """Load this rank's part of the model, allocate its KV cache and warm up.

    Args:
        config: of the engine.
        endpoint: of this process, whose rank is 1 or more.
        report: sends what became of a read of an adapter to the leader; called by any thread.

    Raises:
        StartupError: as for `start_engine`.
    """
    phases = Phases(_Silent(), shown=False)
    with _errors_explained(phases):
        model, _, limits, _ = _load(config, phases, endpoint)
        adapters = None
        if config.max_loras:
            adapters = FollowingLoader(SlotLoader(model, config.max_lora_rank), report)
        return start_follower(model, config, limits, phases, adapters)


class _Silent:
    """The channel of a rank that does not report to the front end."""

    def send(self, message: EngineMessage) -> None:
        """Discard the message."""

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        """Return nothing."""
        del wait
        return []


@contextmanager
def _errors_explained(phases: Phases) -> Iterator[None]:
    """Raise a `StartupError` with an explanation in place of any other error."""
    try:
        yield
    except (StartupError, ModelError, KernelError, NotEnoughMemoryError) as error:
        raise StartupError(str(error)) from error
    except Exception as error:
        # Drivers, libraries and compilers raise errors of many types; the operator may be able to fix the cause.
        log.exception("%s failed", phases.current)
        raise StartupError(explain(error, phases.current)) from error


def _load(config: EngineConfig, phases: Phases, endpoint: RankEndpoint | None) -> _Loaded:
    """Load the model or a rank's part of it.

    Args:
        config: of the engine.
        phases: reports the progress.
        endpoint: of this process; None without other ranks.
    """
    with phases("reading the configuration"):
        path = Path(config.model_path)
        model_config = ModelConfig.from_folder(path, config.model_backend).within(
            config.max_model_len
        )
        model_config = with_modules(path, model_config)
        check_start(config, model_config, has_gpu=torch.cuda.is_available())
        device = _device(config.device, endpoint.rank if endpoint else 0, config.tensor_parallel)
        if config.compiled_kernels is not None:
            _read_compiled_kernels(Path(config.compiled_kernels), device)
        resolved = resolved_quantization(config, model_config, detect(device))
        quantization, in_library, has_products = resolved
        dtype = torch.float32
        if not has_products:
            dtype = resolve_dtype(config.dtype, model_config, device)
        name = str(dtype).removeprefix("torch.")
        network = shard_network(model_config.network, config.tensor_parallel)
        states = state_kernels(network, name, detect(device))
        limits = step_limits(
            config,
            model_config,
            detect(device),
            states.chunk,
            takes_drafts=states.several_queries,
        )
        threads = _set_threads(config, device, native=in_library or has_products)
        set_num_threads(threads)
    communicator = None
    if endpoint is not None:
        with phases("connecting the ranks"):
            communicator = connect(endpoint, device)
    model: DecoderLM
    with phases("loading the weights"), _weights_progress(phases) as progress:
        if model_config.network.modules is None:
            model = load_part(
                path,
                model_config,
                stored_dtype(model_config) if in_library else dtype,
                device,
                config.load_format,
                progress,
                weight_format=resolved.loaded(model_config),
                communicator=communicator,
            )
        else:
            model = load_modules(path, model_config, dtype, device, config.load_format)
            model.check(config.block_size)
            log.warning(
                "modules of transformers compute the model, which is the slow path; GET /plan says why"
            )
        phases.tell("packing the weights")
        model.optimize(quantization if in_library else None, threads, rounds_inputs=has_products)
        model.unmeasured_kernels = config.unmeasured_kernels
        if config.max_loras:
            _reserve_adapters(model, config)
        if config.deterministic:
            kv_dtype = quantized_kv_dtype(config.kv_cache_dtype)
            check_deterministic(model, config.block_size, detect(device), kv_dtype)
    limits = dataclasses.replace(
        limits, exact_rows=exact_rows(model.executors.problem(detect(device)))
    )
    return _Loaded(model, model.config, limits, quantization)


def _read_compiled_kernels(folder: Path, device: torch.device) -> None:
    if device.type == "cpu":
        log.info("--compiled-kernels has no effect: the model runs on the CPU")
        return
    try:
        from kernels.gpu.kernel_cache import read_also  # noqa: PLC0415 - imports Triton
    except ImportError:
        log.warning("--compiled-kernels has no effect: Triton is not installed")
    else:
        read_also(folder)


def release_memory() -> None:
    """Return memory of objects that are no longer referenced to the system, on any device."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing unless a GPU is in use


def _device(requested: str, rank: int, num_ranks: int) -> torch.device:
    """Return the device of a rank, and make its GPU the current one.

    Raises:
        StartupError: there are fewer GPUs than ranks.
    """
    if requested == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if num_ranks == 1:
        return torch.device("cuda")
    visible = torch.cuda.device_count()
    if visible < num_ranks:
        raise StartupError(
            f"--tensor-parallel {num_ranks} needs a GPU for each rank; visible: {visible}"
        )
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _set_threads(config: EngineConfig, device: torch.device, *, native: bool) -> int:
    """Set the number of PyTorch's threads, and log that of the threads that compute the model on a CPU.

    PyTorch's own default is an upper limit, because OMP_NUM_THREADS sets it. Ranks, and the
    engines of one service, share the cores.

    Returns:
        The threads of the C library, which computes models in int8 and int4.
    """
    cpus, requested = usable_cpus(), config.cpu_threads
    most, num_processes = _default_torch_threads(), config.num_engines * config.tensor_parallel
    torch_threads, native_threads = (
        requested
        or max(1, min(most, default_engine_threads(cpus, synchronous=it)) // num_processes)
        for it in (True, False)
    )
    torch.set_num_threads(torch_threads)
    if device.type == "cpu":
        threads = native_threads if native else torch_threads
        log.info("threads: %d, for %s", threads, cpus)
    return native_threads


@functools.cache
def _default_torch_threads() -> int:
    """Return PyTorch's number of threads before the first engine of this process set it."""
    return torch.get_num_threads()


@contextmanager
def _weights_progress(phases: Phases) -> Iterator[LoadProgress]:
    """Report the progress of loading: on a terminal or in the log, and as the start-up phase."""
    say = log.info if phases.shown else lambda _: None
    with Progress("loading the weights", say, shown=phases.shown) as progress:

        def show(done: int, total: int, shard: int, num_shards: int) -> None:
            shards = f"{shard} of {num_shards} shards" if num_shards > 1 else "the weights"
            phases.tell(f"loading {shards}, {bytes_text(done)} of {bytes_text(total)}")
            progress.update(done, total, f"shard {shard} of {num_shards}" if num_shards > 1 else "")

        yield show
