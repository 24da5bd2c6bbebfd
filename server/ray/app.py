"""Tessera on Ray Serve: replicas of the service behind Ray's proxy, on many machines.

    python -m tessera.server.ray.main model=Qwen/Qwen3-0.6B gpus=1 max_replicas=4

starts it on one machine; on a cluster, a configuration file names `tessera.server.ray.app:build` (docs/operations.md).
Each replica is one engine process and the ASGI application in Ray's replica process. Needs the extra `ray`.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from server.cli.command_settings import normalized
from server.cli.settings import Settings
from server.embedding import EmbeddedService, embedded_service
from server.engine.link.protocol import EngineState
from server.ray.router import SEQUENCES, check_version, router_config, with_prefix_routing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from ray.serve import Application
    from starlette.types import ASGIApp

_FULL: Final = 0.8
"""Share of a replica's sequences in use at which another replica is started."""
_LEAVING_SECONDS: Final = 30.0
"""How long Ray keeps a replica that leaves, so that proxies learn of it (its DIRECT_INGRESS_MIN_DRAINING_PERIOD_S)."""


class Options(BaseModel):
    """Arguments of `build`; all others are settings of `tessera serve`, with underscores.

    Attributes:
        min_replicas: replicas that always run.
        max_replicas: replicas under load; None for `min_replicas`, without autoscaling.
        upscale_delay: seconds for which the load must need more replicas before one is added.
        downscale_delay: seconds for which the load must need fewer before one is removed.
        gpus: GPUs of a replica; 0 for a CPU.
        cpus: processors that a replica reserves.
        prefix_routing: send requests whose prompts begin alike to the same replica.
        settings: of the service of each replica.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    min_replicas: int = Field(1, ge=1)
    max_replicas: int | None = Field(None, ge=1)
    upscale_delay: float = Field(30, ge=0)
    downscale_delay: float = Field(600, ge=0)
    gpus: float = Field(0, ge=0, le=1)
    cpus: float = Field(1, ge=0)
    prefix_routing: bool = False
    settings: Settings = Settings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} is less than min_replicas={self.min_replicas}"
            )
        if self.prefix_routing:
            check_version()
        return self


class Tessera:
    """One replica."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = Settings.model_validate(settings)
        self._held: contextlib.AsyncExitStack | None = None
        self._service: EmbeddedService | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Start the engine; the replica is ready when the model is loaded.

        Raises:
            ChildStartError: the engine cannot start; the text says why.
            ModelError, StartupError: see `embedded_service`.
        """
        async with contextlib.AsyncExitStack() as held:
            service = await held.enter_async_context(embedded_service(self._settings))
            await service.wait_until_ready()
            self._held = held.pop_all()
        self._service = service
        # Ray awaits the lifespan's end when it stops the replica. What `__del__` of this class returned it would drop.
        service.app.router.lifespan_context = self._lifespan
        return service.app

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        yield
        await self.end()

    async def drain(self) -> None:
        """Refuse new requests, and return when those in progress have ended, at the latest after `drain_timeout`."""
        assert self._service is not None
        await self._service.drain()

    async def end(self) -> None:
        """End the engine and remove its sockets. What runs gets an error. A second call does nothing."""
        held, self._held = self._held, None
        if held is not None:
            await held.aclose()

    def check_health(self) -> None:
        """Have the replica replaced if its engine cannot be started again. An engine that is starting is healthy.

        Raises:
            RuntimeError: the engine has ended for good.
        """
        engine = self._engine
        if engine.state is EngineState.STOPPED:
            raise RuntimeError(f"the engine has stopped: {engine.phase}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `replicas_for_load` needs."""
        stats, info = self._engine.stats, self._engine.info
        return {
            "sequences": stats.num_running + stats.num_waiting,
            "places": 0 if info is None else info.max_num_seqs,
        }

    def record_routing_stats(self) -> dict[str, int]:
        """Return the load for `server.ray.router`."""
        stats = self._engine.stats
        return {SEQUENCES: stats.num_running + stats.num_waiting}

    @property
    def _engine(self) -> Any:  # noqa: ANN401 - an `EngineClient`
        assert self._service is not None
        return self._service.engine


def replicas_for_load(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas the sequences need that run and wait, and an empty state."""
    metrics = context.aggregated_metrics or {}
    sequences = sum(metrics.get("sequences", {}).values())
    places = max(metrics.get("places", {}).values(), default=0)
    if not places:
        return context.target_num_replicas, {}
    wanted = math.ceil(sequences / (_FULL * places))
    bounds = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return min(max(wanted, bounds[0]), bounds[1]), {}


def options_of(arguments: dict[str, Any]) -> Options:
    """Check the arguments of `build`.

    Raises:
        pydantic.ValidationError: a name or a value is wrong, or Ray's version.
    """
    own = Options.model_fields.keys() - {"settings"}
    return Options.model_validate(
        {name: value for name, value in arguments.items() if name in own}
        | {"settings": _settings(arguments, own)}
    )


def _settings(arguments: dict[str, Any], others: Collection[str]) -> dict[str, Any]:
    """Return the settings among arguments as the service takes them; texts as those of its flags."""
    return {
        name: normalized(name, value)
        if isinstance(value, str) and name in Settings.model_fields
        else value
        for name, value in arguments.items()
        if name not in others
    }


def build(arguments: dict[str, Any]) -> Application:
    """Make the application that `serve run` or a configuration file of Ray Serve deploys.

    Args:
        arguments: fields of `Options`, and settings by name, as numbers or texts.

    Raises:
        pydantic.ValidationError: a name or a value is wrong, or Ray's version.
    """
    options = options_of(arguments)
    given = _settings(arguments, arguments.keys() - Settings.model_fields.keys())
    replicas: dict[str, Any] = {"num_replicas": options.min_replicas}
    if options.max_replicas is not None:
        replicas = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.min_replicas,
                max_replicas=options.max_replicas,
                upscale_delay_s=options.upscale_delay,
                downscale_delay_s=options.downscale_delay,
                policy=AutoscalingPolicy(policy_function=replicas_for_load),
            )
        }
    if options.prefix_routing:
        replicas["request_router_config"] = router_config()
    deployment = serve.deployment(
        name="tessera",
        # The service itself limits and queues; Ray must not refuse before it.
        max_ongoing_requests=1_000_000,
        graceful_shutdown_timeout_s=_LEAVING_SECONDS + options.settings.drain_timeout,
        health_check_period_s=5,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        **replicas,
    )(serve.ingress()(Tessera))
    application = deployment.bind(given)
    return with_prefix_routing(application) if options.prefix_routing else application
