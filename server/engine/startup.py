"""Builds an engine from its configuration, phase by phase, telling the front end and the log how far it is."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from model.config import ModelConfig
from model.errors import ModelError
from model.kv_cache import KVCache, bytes_per_token
from model.weights import load_model, resolve_dtype
from server.engine.block_manager import BlockManager
from server.engine.engine import Engine
from server.engine.memory import NotEnoughMemoryError, kv_cache_blocks
from server.engine.model_runner import ModelRunner
from server.engine.protocol import EngineConfig, EngineInfo, StartupPhase
from server.engine.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.engine.engine import EngineChannel

log = logging.getLogger("tessera.engine")


# Share of the blocks kept empty, so that a sequence finds neighbouring ones: the CPU's attention reads
# a run in one call. 0.2 makes 2.2 runs of a sequence where 0 makes 35 (64 sequences, a pool of twice
# their demand, prefix caching on), at the price of evicting cached blocks earlier.
_CPU_CONTIGUITY_RESERVE = 0.2


# Tokens of a step, at most, where the operator does not say: a step in which a long prompt is computed
# is what the other streams wait for, and a CPU takes longer for it.
_DEFAULT_BUDGET = {"cpu": 512, "cuda": 2048}
_FEWEST_TOKENS = 2


class StartupError(Exception):
    """The engine cannot start for a reason that the operator can mend; the text says which."""


class _Phases:
    """Announces each phase to the front end and notes how long it took."""

    def __init__(self, channel: EngineChannel) -> None:
        self.seconds: dict[str, float] = {}
        self._channel = channel
        self._said = 0.0

    def say(self, progress: str) -> None:
        """Tell the front end how far the phase is, at most once a second."""
        if time.monotonic() - self._said > 1.0:
            self._said = time.monotonic()
            self._channel.send(StartupPhase(progress))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._channel.send(StartupPhase(name))
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        log.info("%-28s %6.2f s", name, self.seconds[name])


def start_engine(config: EngineConfig, channel: EngineChannel) -> Engine:
    """Load the model, allocate the KV cache, warm up.

    Raises:
        StartupError: the configuration, the checkpoint or the machine does not allow it.
    """
    phases = _Phases(channel)
    try:
        with phases("reading the configuration"):
            model_config = ModelConfig.from_folder(Path(config.model_path))
            device = _device(config.device)
            limits = _limits(config, model_config, device)
            dtype = resolve_dtype(config.dtype, model_config, device)
            _set_threads(config.cpu_threads)
        with phases("loading the weights"), _weights_progress(phases) as progress:
            model = load_model(
                Path(config.model_path), model_config, dtype, device, config.load_format, progress
            )
        with phases("allocating the KV cache"):
            kv_cache = _kv_cache(config, model_config, limits, dtype, device)
            max_total_tokens = min(limits.max_model_len, kv_cache.num_blocks * config.block_size)
            if max_total_tokens < _FEWEST_TOKENS:
                raise StartupError(
                    f"a KV cache of {max_total_tokens} token cannot hold a prompt and an answer; "
                    f"--kv-cache-tokens must be at least {_FEWEST_TOKENS}"
                )
        with phases("warming up"):
            runner = ModelRunner(model, kv_cache)
            runner.warm_up(limits.max_num_batched_tokens, max_total_tokens)
    except (ModelError, NotEnoughMemoryError) as error:
        raise StartupError(str(error)) from error
    blocks = BlockManager(
        kv_cache.num_blocks,
        config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        contiguity_reserve=_CPU_CONTIGUITY_RESERVE if device.type == "cpu" else 0.0,
    )
    info = EngineInfo(
        model_id=config.model_id,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=model_config.vocab_size,
        max_model_len=limits.max_model_len,
        max_total_tokens=max_total_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=kv_cache.num_blocks,
        num_parameters=model_config.num_parameters,
        plan=runner.describe_plan(),
        startup_seconds=phases.seconds,
        versions={"python": platform.python_version(), "torch": str(torch.__version__)},
    )
    log.info(
        "%s: %.1fM parameters in %s on %s, KV cache of %d tokens",
        info.model_id,
        info.num_parameters / 1e6,
        info.dtype,
        info.device,
        kv_cache.num_blocks * config.block_size,
    )
    return Engine(Scheduler(limits, blocks), runner, channel, info)


def _limits(config: EngineConfig, model: ModelConfig, device: torch.device) -> SchedulerConfig:
    """Fill in what the operator left open."""
    budget = config.max_num_batched_tokens
    if budget is None:
        budget = max(_DEFAULT_BUDGET[device.type], config.max_num_seqs)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=_max_model_len(config.max_model_len, model.max_context),
    )


def _kv_cache(
    config: EngineConfig,
    model: ModelConfig,
    limits: SchedulerConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    num_blocks = kv_cache_blocks(
        requested_tokens=config.kv_cache_tokens,
        useful_tokens=limits.max_num_seqs * limits.max_model_len,
        block_size=config.block_size,
        bytes_per_token=bytes_per_token(
            model.num_layers, model.num_kv_heads, model.head_dim, dtype
        ),
        device=device,
    )
    return KVCache(
        model.num_layers,
        num_blocks,
        config.block_size,
        model.num_kv_heads,
        model.head_dim,
        dtype,
        device,
    )


def _device(requested: str) -> torch.device:
    available = torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise StartupError(
            "--device cuda: PyTorch sees no CUDA device here; use --device cpu or auto"
        )
    return torch.device("cuda" if available and requested != "cpu" else "cpu")


def _max_model_len(requested: int | None, limit: int) -> int:
    if requested is not None and requested > limit:
        raise StartupError(
            f"--max-model-len {requested} is more than the model's own limit of {limit} tokens"
        )
    return requested or limit


def _set_threads(requested: int | None) -> None:
    """PyTorch's choice, one thread for each physical core, less one core for the front end."""
    spare = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(requested or max(1, min(torch.get_num_threads(), (spare or 1) - 1)))


@contextmanager
def _weights_progress(phases: _Phases) -> Iterator[Callable[[int, int], None]]:
    """Shows the bytes loaded: a bar where a person watches, the phase for everybody else."""
    with tqdm(
        unit="B", unit_scale=True, desc="weights", leave=False, disable=not sys.stderr.isatty()
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            phases.say(f"loading the weights, {done / max(1, total):.0%}")

        yield show
