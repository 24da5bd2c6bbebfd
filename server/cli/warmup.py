"""`tessera warmup`: start an engine as the service does and end it, so that the next start finds its kernels compiled.

Imports PyTorch, so `server.cli.commands` imports it for this command alone.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from server.engine.core.messages import EngineMessage, FrontEndMessage, Shutdown
from server.engine.runner.startup import StartupError, start_engine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.messages import EngineConfig


class _EndsAtOnce:
    """Stands where the sockets are: lets the engine use its idle time, then ends it."""

    def send(self, message: EngineMessage) -> None:
        """Nobody listens; the log tells of the phases."""

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        """End the engine when it has nothing else to do."""
        return [Shutdown()] if math.isinf(wait) else []


def warm_up(config: EngineConfig, began: float) -> None:
    """Start an engine, let it record its steps, and say what the start took.

    Exits with status 1 where it cannot start.

    Args:
        config: from the settings of the service to come.
        began: `time.perf_counter()` when the command began.
    """
    try:
        engine = start_engine(config, _EndsAtOnce())
    except StartupError as error:
        print(f"tessera warmup: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    ready = time.perf_counter() - began
    engine.run()
    seconds = ", ".join(
        f"{phase} {took:.1f} s" for phase, took in engine.info.startup_seconds.items()
    )
    print(f"ready after {ready:.1f} s ({seconds})")
    if not engine.info.device.startswith("cpu"):
        from triton import knobs  # noqa: PLC0415 - only there for GPUs

        print(f"the next start finds its kernels in {knobs.cache.dir}")
