"""`tessera warmup`: starts an engine like the service and ends it, so that the next start finds compiled kernels.

Imports PyTorch, so `server.cli.commands` imports it only for this command.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from server.engine.core.messages import EngineMessage, FrontEndMessage, Shutdown
from server.engine.core.start_checks import StartupError
from server.engine.runner.startup import start_engine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.engine.core.messages import EngineConfig


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

    Args:
        config: of the engine, from the settings of the service.
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
        from triton import knobs  # noqa: PLC0415 - only installed for GPUs

        print(f"the compiled kernels are in {knobs.cache.dir}")
