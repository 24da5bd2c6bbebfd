"""`tessera warmup`: compiles the kernels of a service, so that its next start finds them in the cache.

On the GPU, it starts an engine like the service and ends it. For an absent GPU, it only compiles.

Imports PyTorch, so `server.cli.command_groups` imports it only for this command.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kernels.arch import GPUArch, known_processors
from model.progress import Status
from server.cli.output import fail
from server.engine.core.messages import EngineConfig, EngineMessage, FrontEndMessage, Shutdown
from server.engine.core.start_checks import StartupError
from server.engine.link.engine_process.rank_processes import RankProcesses
from server.engine.runner.start.compile_absent import compile_for
from server.engine.runner.start.startup import start_engine


class _EndsAtOnce:
    """A channel without a front end: lets the engine use its idle time, then ends it."""

    def send(self, message: EngineMessage) -> None:
        """Discard the message."""

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        """Return a shutdown message once the engine waits without a limit, when its idle work is done."""
        return [Shutdown()] if math.isinf(wait) else []


def warm_up(config: EngineConfig, began: float) -> None:
    """Start an engine, record its steps, and print the duration of the start.

    Exits with status 1 if the engine cannot start.
    """
    try:
        ranks = RankProcesses(config) if config.tensor_parallel > 1 else None
        engine = start_engine(config, _EndsAtOnce(), ranks)
    except StartupError as error:
        fail(str(error), "warmup")
    ready = time.perf_counter() - began
    engine.run()
    seconds = ", ".join(
        f"{phase} {took:.1f} s" for phase, took in engine.info.startup_seconds.items()
    )
    print(f"ready after {ready:.1f} s ({seconds})")
    if not engine.info.device.startswith("cpu"):
        from triton import knobs  # noqa: PLC0415 - only installed for GPUs

        print(f"the compiled kernels are in {knobs.cache.dir}")


def compile_ahead(config: EngineConfig, arch: str, output: str | None, began: float) -> None:
    """Compile the kernels of a service for GPUs, and print how many there are.

    Exits with status 1 if they cannot be compiled.

    Args:
        config: of the engine; its weights are not read.
        arch: the GPU's key in the catalogue, or a compute capability, for all GPUs of the catalogue that have it.
        output: folder for the compiled kernels; None for Triton's cache.
        began: `time.perf_counter()` when the command began.
    """
    try:
        from triton import knobs  # noqa: PLC0415 - only installed for GPUs

        from kernels.gpu import kernel_cache  # noqa: PLC0415 - imports Triton
    except ImportError:
        fail("Triton is not installed: pip install triton==3.6.0", "warmup")
    if output is not None:
        try:
            kernel_cache.write_to(Path(output))
        except OSError as error:
            fail(f"cannot write compiled kernels to {output}: {error}", "warmup")
    status = Status(_say)
    try:
        folder = Path(knobs.cache.dir)
        # The tiles of some kernels depend on the number of SMs.
        for processor in known_processors(arch):
            compile_for(config, processor, _of(processor, status))
        if output is not None:
            kernel_cache.drop_sources(folder)
    except StartupError as error:
        fail(str(error), "warmup")
    except OSError as error:
        fail(f"compiling into {knobs.cache.dir}: {error}", "warmup")
    finally:
        status.clear()
    kernels, seconds = kernel_cache.num_kernels(folder), time.perf_counter() - began
    print(f"{folder} has {kernels} compiled kernels, after {seconds:.1f} s")


def _of(processor: GPUArch, status: Status) -> Callable[[str], None]:
    """Return a function that shows what is done for a processor."""
    return lambda text: status.show(f"{processor}: {text}")


def _say(text: str) -> None:
    print(f"tessera warmup: {text}", file=sys.stderr, flush=True)
