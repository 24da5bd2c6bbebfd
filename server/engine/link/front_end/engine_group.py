"""The engine processes of a service: starts and stops them together, and chooses the one for a request.

Imports no PyTorch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING

from server.engine.link.engine_process.supervisor import STOP_SECONDS, EngineSupervisor
from server.engine.link.front_end.combined import EngineReports
from server.engine.link.front_end.routing import Router
from server.engine.link.protocol import EngineState, RequestPrompt
from server.engine.link.silence import tick_seconds
from server.engine.link.spawn import ENGINE_COMMAND

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.engine.core.messages import EngineConfig, StepMessage
    from server.engine.link.spawn import LinkedProcess

log = logging.getLogger("tessera.client")


class EngineGroup(EngineReports):
    """Owns a supervisor for each engine process; a subclass owns the requests in flight and knows their engines.

    Each request is answered by one engine. If a process ends, its requests are lost, and others go to the engines that
    are ready; see `Router`.

    `launch` may be called before the event loop runs, so that this process imports its modules while the engine
    processes import theirs; `start` then attaches to the loop. Not thread-safe.

    Attributes:
        engines: the supervisors, by the number of the engine.
        hang_seconds: see the argument.
        failed: done, with the reason, when the service can do nothing but end: no engine can be started again. Exists
            from `start` on.

    Args:
        config: of each engine, for the first start and for restarts; `engine` and `num_engines` are set here.
        hang_seconds: see `EngineSupervisor`.
        command: starts an engine process.
        spawned: an engine process without a configuration, for the first start of the first engine; None spawns one.
        environments: for each engine, the variables of its process that differ from those of this one.
    """

    def __init__(
        self,
        config: EngineConfig,
        hang_seconds: float = 60.0,
        command: Sequence[str] = ENGINE_COMMAND,
        spawned: LinkedProcess | None = None,
        environments: Sequence[Mapping[str, str]] = ({},),
    ) -> None:
        super().__init__()  # the other base class of `EngineClient`
        self.hang_seconds = hang_seconds
        self.engines = [
            EngineSupervisor(
                dataclasses.replace(config, engine=i, num_engines=len(environments)),
                self,
                hang_seconds,
                command,
                environment,
                None if i else spawned,
            )
            for i, environment in enumerate(environments)
        ]
        self.reports = [engine.report for engine in self.engines]
        self._keeps_prefixes = config.enable_prefix_caching
        self._num_adapters = config.num_host_adapters
        self._router = Router(len(self.engines), config.block_size)
        self._hang_watch: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[str]

    def launch(self) -> None:
        """Start the engine processes and send them their configurations; returns at once.

        Raises:
            ChildStartError: the operating system refuses one.
        """
        for engine in self.engines:
            engine.launch()

    async def start(self) -> None:
        """Supervise from the running event loop, after a `launch` if there was none; does not wait for the engines.

        Raises:
            ChildStartError: the operating system refuses.
        """
        self.failed = asyncio.get_running_loop().create_future()
        for engine in self.engines:
            engine.start()
        self._hang_watch = asyncio.create_task(self._watch_for_hangs())

    async def wait_until_ready(self) -> None:
        """Wait until the first start of all engines succeeds, or that of one fails.

        Raises:
            ChildStartError: an engine cannot start; there is no second attempt.
        """
        await asyncio.gather(*(engine.wait_until_ready() for engine in self.engines))
        infos = [report.info for report in self.reports if report.info is not None]
        kinds = {f"{i.plan.arch_name} in {i.dtype}, {i.kv_cache_dtype} cache" for i in infos}
        if len(kinds) > 1:
            log.warning("replies depend on the engine, because they differ: %s", sorted(kinds))

    def kill(self) -> None:
        """End the engine processes at once; needs no event loop. Does nothing after `stop`."""
        for engine in self.engines:
            engine.kill()
        self._close()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the engine processes and all requests in flight; a process is killed after some seconds."""
        if self._hang_watch is not None:
            self._hang_watch.cancel()
        for engine in self.engines:
            engine.refuse_requests()  # all, before the requests of one could be sent to another
        await asyncio.gather(*(engine.stop(seconds) for engine in self.engines))
        self._close()

    def has_requests(self, engine: int) -> bool:
        """Whether an engine has requests in flight."""
        raise NotImplementedError

    def on_steps(self, engine: int, steps: list[tuple[bytes, StepMessage]], /) -> None:
        """Handle messages of an engine's steps; see `EngineOwner`."""
        raise NotImplementedError

    def on_change(self, engine: int) -> None:
        """Handle a change of an engine's report; see `EngineOwner`."""
        report = self.reports[engine]
        if report.state is EngineState.READY and report.info is not None:
            num_blocks = report.info.num_blocks if self._keeps_prefixes else 0
            self._router.begin(engine, num_blocks, self._num_adapters)
        self._on_change()

    def on_loss(self, engine: int, error: str) -> None:
        """Handle the loss of an engine's requests; see `EngineOwner`."""
        self._router.begin(engine)
        self._on_loss(engine, error)

    def on_failure(self, engine: int, reason: str) -> None:
        """Give up once no engine has been started for long; see `EngineOwner`."""
        if all(it.is_hopeless for it in self.engines):
            for it in self.engines:
                it.give_up()
            name = f"engine {engine}" if len(self.engines) > 1 else "the engine"
            self.fail(f"{name} could not be started again: {reason}")

    def fail(self, reason: str) -> None:
        """Make the service end; see `failed`."""
        if not self.failed.done():
            self.failed.set_result(reason)

    def _loads(self) -> list[int]:
        """Return the number of requests in flight of each engine."""
        raise NotImplementedError

    def _on_change(self) -> None:
        """Handle a change of a report, other than of its `stats`."""
        raise NotImplementedError

    def _on_loss(self, engine: int, error: str) -> None:
        """End the requests in flight of an engine, or send them elsewhere."""
        raise NotImplementedError

    def _check_front_ends(self) -> None:
        """Called once per period, of `tick_seconds`."""

    def _choose(self, prompt: Callable[[], RequestPrompt]) -> EngineSupervisor:
        """Choose the engine of a request, while the state is ready.

        Args:
            prompt: returns what the choice depends on; not called if there is no choice.
        """
        if len(self.engines) == 1:
            return self.engines[0]
        found = prompt()
        ready = [engine.number for engine in self.engines if engine.is_ready]
        chosen = self._router.choose(
            found.prompt_token_ids, found.part, self._loads(), ready, found.digest
        )
        return self.engines[chosen]

    def _close(self) -> None:
        """Release what the subclass has opened."""

    async def _watch_for_hangs(self) -> None:
        """Look for hung processes once per period."""
        checks = [*(engine.check for engine in self.engines), self._check_front_ends]
        while True:
            await asyncio.sleep(tick_seconds(self.hang_seconds))
            for check in checks:
                try:
                    check()
                except Exception:  # the watch must go on
                    log.exception("looking for hung processes failed")
